"""``parity init-port``: write a port template that already agrees with the reference."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path

from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import write_text

FRAMEWORKS = ("torch", "jax", "tf", "other")
NAME = "my_port"  # the module name in the templates, which is replaced by the name of the output file
# Modules that ports import. PathFinder doesn't find the project's own modules if they are installed in editable mode.
OURS = ("reference_numpy", "transformer_spec", "transformer_parity", "transformer_torch", "transformer_jax")
IMPORTED = (*OURS, "transformer_tf", "torch", "jax", "flax", "optax", "tensorflow", "keras", "mlx", "equinox")
EXAMPLES = """
examples:
  parity init-port --framework torch                     write my_port.py
  parity init-port --framework other --out marian.py     use a different framework and exchange NumPy arrays with it

exit code: 0 written, 3 not written
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "init-port",
        description="Write a template for a port, a class that wraps your model so that `parity` can compare it with "
        "the reference. The template wraps a placeholder model that already agrees with the reference. First replace "
        "load and forward, because both methods must use the same model, and delete all other methods for now. Check "
        "only the forward pass with `parity check --stage activations`. When the forward pass agrees with the "
        "reference, add the other methods and rerun the check without --stage.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, required=True, help="write the template for a model in this framework"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(f"{NAME}.py"),
        metavar="FILE",
        help=f"write the template to this file (default: {NAME}.py)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file and return the exit code."""
    path: Path = options.out
    write_template(path, NAME, lambda: skeleton(options.framework, path.stem))
    print(f"Wrote {path}. It already agrees with the reference. Check it with parity or pytest:")
    if path.parent.resolve() != Path.cwd():  # `module:class` is imported from the current directory
        print(f"  cd {path.parent}")
    print(f"  parity check --port {path.stem}:MyPort")
    print(f"  pytest --parity-port={path.stem}:MyPort")
    print("Then replace load and forward with your model, delete the methods that you have not written yet, and")
    print("check only the forward pass:")
    print(f"  parity check --port {path.stem}:MyPort --stage activations")
    return 0


def write_template(path: Path, usual: str, source: Callable[[], str]) -> None:
    """Write a template to a new file.

    Args:
        path: Path of the file.
        usual: The default name of the module, which error messages suggest.
        source: Function that returns the source code.

    Raises:
        UsageError: If the name can't be imported or would hide another module, or if the file exists.
    """
    if path.suffix != ".py" or not path.stem.isidentifier() or iskeyword(path.stem):
        raise UsageError(
            f"--out must be a .py file whose name is a valid module name, such as {usual}.py: got {path.name}"
        )
    if _is_imported(path.stem):
        raise UsageError(
            f"--out {path.name} would hide the module {path.stem} from all code that imports this module; "
            f"choose a different name, such as {usual}.py"
        )
    if path.exists():
        raise UsageError(f"{path} already exists; choose a different name with --out, or delete the file")
    with refusals(OSError):
        write_text(path, source())


def _is_imported(name: str) -> bool:
    """Return whether a port, or a library that it uses, might need to import an existing module with this name."""
    places = [place for place in sys.path if place and Path(place).resolve() != Path.cwd()]
    return name in IMPORTED or name in sys.stdlib_module_names or PathFinder.find_spec(name, places) is not None


def skeleton(framework: str, module: str) -> str:
    """Return the source code of the template for a framework, using the given module name."""
    template = files("transformer_parity.transformer.ports.templates").joinpath(f"{framework}_port.py")
    return template.read_text("utf-8").replace(NAME, module)
