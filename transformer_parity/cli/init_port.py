"""``parity init-port``: a port that runs and agrees, to start from."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import write_text

FRAMEWORKS = ("torch", "jax", "tf", "other")
NAME = "my_port"  # of the templates' module, as it stands in them


EXAMPLES = """
examples:
  parity init-port --framework torch                     writes my_port.py
  parity init-port --framework other --out marian.py     any framework: NumPy arrays go in and come out

exit code: 0 written, 3 not written
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "init-port",
        description="Write a port that runs and agrees, around a stand-in: replace it by your own model, method by "
        "method, and compare after each.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True, help="what your model is written in")
    parser.add_argument(
        "--out", type=Path, default=Path(f"{NAME}.py"), metavar="FILE", help=f"where to; default: {NAME}.py"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file and return the exit code."""
    path: Path = options.out
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UsageError(f"--out must be a module that Python can import, such as {NAME}.py: got {path.name}")
    if path.exists():
        raise UsageError(f"{path} exists: choose a different name with --out, or remove the file")
    with refusals(OSError):
        write_text(path, skeleton(options.framework, path.stem))
    print(f"Wrote {path}. It agrees as it stands; compare it with")
    if path.parent.resolve() != Path.cwd():  # where `module:class` is looked for
        print(f"  cd {path.parent}")
    print(f"  parity check --port {path.stem}:MyPort")
    print(f"  pytest --parity-port={path.stem}:MyPort")
    return 0


def skeleton(framework: str, module: str) -> str:
    """Return the source of a port, as a module of some name."""
    template = files("transformer_parity.transformer.ports.templates").joinpath(f"{framework}_port.py")
    return template.read_text("utf-8").replace(NAME, module)
