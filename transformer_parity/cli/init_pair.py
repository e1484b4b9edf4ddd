"""``parity init-pair``: write a template with two implementations of a toy model, which agree."""

from __future__ import annotations

import argparse
import re
from importlib.resources import files
from pathlib import Path

from transformer_parity.cli.init_port import write_template

FRAMEWORKS = ("numpy", "torch", "jax", "keras", "mlx", "equinox")
NAME = "my_pair"  # the module name in the template, which is replaced by the name of the output file
IMPORT = re.compile(r"^(?:import|from) (?!__future__).*", re.MULTILINE)
EXAMPLES = """
examples:
  parity init-pair --framework torch,jax                      write my_pair.py: Original in PyTorch, Port in Flax NNX
  parity init-pair --framework torch                          write both classes in PyTorch
  parity init-pair --framework keras,mlx --out bert_pair.py   choose a different file name
  parity pair my_pair.py                                      compare the two classes

exit code: 0 written, 3 not written
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "init-pair",
        description="Write a template for `parity pair`: a class Original for the implementation that you trust, and a "
        "class Port for your port. Both run the same toy model with embeddings, attention, layer norm, and GELU, and "
        "they already agree. Replace the toy model in one class after the other with your model, and run `parity pair` "
        "after each change.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--framework",
        type=_frameworks,
        required=True,
        metavar="ORIGINAL,PORT",
        help=f"the frameworks of the two classes, or one framework for both: {', '.join(FRAMEWORKS)} (jax is Flax NNX)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(f"{NAME}.py"),
        metavar="FILE",
        help=f"write the template to this file (default: {NAME}.py)",
    )
    parser.set_defaults(run=run)


def _frameworks(text: str) -> tuple[str, str]:
    """Return the frameworks of the two classes."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in FRAMEWORKS]:
        raise argparse.ArgumentTypeError(
            f"unknown {', '.join(map(repr, unknown))}; choose from {', '.join(FRAMEWORKS)}"
        )
    if len(names) > 2:
        raise argparse.ArgumentTypeError(f"must be one or two frameworks, such as torch,jax: got {text}")
    return names[0], names[-1]


def run(options: argparse.Namespace) -> int:
    """Write the file and return the exit code."""
    path: Path = options.out
    write_template(path, NAME, lambda: template(*options.framework).replace(NAME, path.stem))
    print(f"Wrote {path}. Its classes Original and Port already agree. Compare them:")
    print(f"  parity pair {path}")
    print("Then replace the toy model in Original, and afterwards in Port. Rerun the command after each change.")
    return 0


def template(original: str, port: str) -> str:
    """Return the source code of a template for two frameworks."""
    top, code = _part("header")
    lines = set(IMPORT.findall(top))
    for role, framework in (("Original", original), ("Port", port)):
        imports, body = _part(f"{framework}_model")
        lines |= {line for line in IMPORT.findall(imports) if "templates" not in line}
        declaration = f"class {role}(Implementation):\n"
        # "Role" and "role" are placeholders for the name of the class.
        model, methods = body.replace("Role", role).replace("role_", f"{role.lower()}_").split(declaration)
        before, after = code.split(declaration)
        docstring, after = after.split('"""\n', 1)
        methods = methods.split('"""\n', 1)[1]
        code = f'{before}{model}{declaration}{docstring}"""\n{methods}{after}'
    start, sizes = top.partition("import numpy")[0], top.rpartition("\n")[2]
    imports = "\n".join(sorted(lines, key=lambda line: (line.startswith("from"), line)))
    return f"{start}{imports}\n\n{sizes}\n\n\n{code}"


def _part(name: str) -> tuple[str, str]:
    """Return the imports and the code of a file."""
    text = files("transformer_parity.pairs.templates").joinpath(f"{name}.py").read_text("utf-8")
    imports, _, code = text.partition("\n\n\n")
    return imports, code
