"""``parity init-port``: a port that runs and agrees, to start from."""

from __future__ import annotations

import argparse
import sys
from importlib.machinery import PathFinder
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path

from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import write_text

FRAMEWORKS = ("torch", "jax", "tf", "other")
NAME = "my_port"  # of the templates' module, as it stands in them
# Modules that ports import; PathFinder doesn't find ours if they are installed in editable mode.
OURS = ("reference_numpy", "transformer_spec", "transformer_parity", "transformer_torch", "transformer_jax")
IMPORTED = (*OURS, "transformer_tf", "torch", "jax", "flax", "optax", "tensorflow", "keras")
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
    if path.suffix != ".py" or not path.stem.isidentifier() or iskeyword(path.stem):
        raise UsageError(f"--out must be a module that Python can import, such as {NAME}.py: got {path.name}")
    if _is_imported(path.stem):
        raise UsageError(
            f"--out {path.name} would hide the module {path.stem} from everything that imports it: "
            f"choose a different name, such as {NAME}.py"
        )
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


def _is_imported(name: str) -> bool:
    """Whether a port, or anything that it imports, may import a module of this name."""
    places = [place for place in sys.path if place and Path(place).resolve() != Path.cwd()]
    return name in IMPORTED or name in sys.stdlib_module_names or PathFinder.find_spec(name, places) is not None


def skeleton(framework: str, module: str) -> str:
    """Return the source of a port, as a module of some name."""
    template = files("transformer_parity.transformer.ports.templates").joinpath(f"{framework}_port.py")
    return template.read_text("utf-8").replace(NAME, module)
