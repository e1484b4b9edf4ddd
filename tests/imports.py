"""Find the imports of the packages in their source, using ``ast`` to include imports that never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
SPEC, PARITY, BENCH = "transformer_spec", "transformer_parity", "transformer_bench"
BASE = {"numpy", "safetensors", "ml_dtypes"}  # packages that every installation has
BACKENDS = ("reference_numpy", "transformer_torch", "transformer_jax", "transformer_tf")
PROGRAM = (SPEC, *BACKENDS, PARITY, BENCH)


def imports(directory: Path, *, types: bool) -> dict[str, set[str]]:
    """Return the modules of the same package that each module of a package imports, by dotted name.

    Importing a submodule isn't considered an import of its parent packages, although Python runs their ``__init__``
    first. Otherwise, no ``__init__`` could export anything.

    Args:
        directory: Directory of the package; subdirectories are subpackages.
        types: Whether to include imports under ``if TYPE_CHECKING``.
    """
    files = {module_name(path, directory.parent): path for path in sorted(directory.rglob("*.py"))}
    return {
        module: {name if name in files else name.rpartition(".")[0] for name in imported(module, path, types)}
        & files.keys()
        for module, path in files.items()
    }


def imported(module: str, path: Path, types: bool) -> Iterator[str]:
    """Yield the dotted name of everything that a file imports, whether a module or a name in a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) in TYPE_CHECKING]
    skipped = {inner for guard in guards for node in guard.body for inner in ast.walk(node) if not types}
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)


def packages_of(directory: Path, *, types: bool = False, root: Path = ROOT) -> dict[str, set[str]]:
    """Return the top-level packages that each file of a package imports, by the file's path relative to the root."""
    return {
        path.relative_to(root).as_posix(): {
            name.partition(".")[0] for name in imported(module_name(path, root), path, types)
        }
        for path in sorted(directory.rglob("*.py"))
    }


def module_name(path: Path, root: Path) -> str:
    """Return the dotted module name of a file."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle(directory: Path, *, types: bool) -> list[str]:
    """Return an import cycle in a package, as modules that each import the next, or an empty list if there is none."""
    try:
        TopologicalSorter(imports(directory, types=types)).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []
