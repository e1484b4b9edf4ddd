"""Imports inside a package never lead back to where they began, imports inside functions included.

The source is read, not run: ``ast`` sees every import statement, executed or not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(folder: Path, *, types: bool) -> dict[str, set[str]]:
    """Return the modules of the same package that each module of a package imports, by dotted name.

    A sub-module that is imported is an import of that sub-module alone, though Python runs the ``__init__`` of each
    package above it first: else no ``__init__`` could export anything.

    Args:
        folder: The folder of the package, sub-packages in sub-folders.
        types: Counts the imports under ``if TYPE_CHECKING`` too.
    """
    files = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {
        module: {name if name in files else name.rpartition(".")[0] for name in imported(module, path, types)}
        & files.keys()
        for module, path in files.items()
    }


def imported(module: str, path: Path, types: bool) -> Iterator[str]:
    """Yield the dotted name of everything that a file imports, be it a module or a name inside one."""
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


def circle(folder: Path, *, types: bool) -> list[str]:
    """Return modules of a package, each of which imports the next and the last of which is the first; or none."""
    try:
        TopologicalSorter(imports(folder, types=types)).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


@pytest.mark.parametrize("package", ["reference_numpy", "transformer_torch", "transformer_jax", "transformer_tf"])
def test_no_import_circle(package):
    assert imports(ROOT / package, types=True)[f"{package}.transformer"] >= {f"{package}.decoder", f"{package}.masks"}
    assert circle(ROOT / package, types=True) == []


WAYS = {  # how b.py can import a.py, which imports b.py
    "absolute": "from house.room.a import A",
    "the module": "from house.room import a",
    "its dotted name": "import house.room.a as a",
    "relative": "from .a import A",
    "relative, the module": "from . import a",
    "relative, from above": "from ..room.a import A",
    "inside a function": "def b():\n    from house.room.a import A",
    "inside a method, under a condition": "class B:\n    def b(self):\n        if self:\n            from . import a",
    "through the package's own exports": "from house.room import A",
    "where types are not checked": "if TYPE_CHECKING:\n    import os\nelse:\n    from house.room.a import A",
}


def house(folder: Path, b: str) -> Path:
    """Write a package with two modules, the first of which imports the second."""
    files = {"__init__": "", "room/__init__": "from house.room.a import A", "room/a": "from house.room.b import B"}
    (folder / "house/room").mkdir(parents=True)
    for name, text in (files | {"room/b": b}).items():
        (folder / f"house/{name}.py").write_text(text)
    return folder / "house"


@pytest.mark.parametrize("way", WAYS)
def test_a_circle_is_found(tmp_path, way):
    found = circle(house(tmp_path, WAYS[way]), types=False)
    assert found[0] == found[-1]
    assert {"house.room.a", "house.room.b"} <= set(found)


@pytest.mark.parametrize("b", ["", "import os\nfrom house import other", "from elsewhere.room.a import A"])
def test_what_is_no_circle_is_none(tmp_path, b):
    assert circle(house(tmp_path, b), types=True) == []


@pytest.mark.parametrize("guard", TYPE_CHECKING)
def test_imports_for_the_type_checker_count_where_wanted(tmp_path, guard):
    package = house(tmp_path, f"if {guard}:\n    from house.room.a import A")
    assert circle(package, types=False) == []
    assert circle(package, types=True) != []
