"""The layers of ``transformer_parity``: imports only point to lower layers, and no directory has too many files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from imports import PARITY, ROOT, circle, imports

PACKAGE = ROOT / PARITY
BESIDE = ""  # the files next to the sub-packages of a layer
# From the lowest to the highest layer. Each layer imports only earlier layers, and each sub-package imports only
# earlier sub-packages of its layer. Files next to the sub-packages come last, or at the position of ``BESIDE``. They
# may import each other, but without cycles.
ROOMS = {
    "engine": ("system", "processes", BESIDE, "report"),
    "pairs": ("contract", "run", "compare", "diagnose", BESIDE, "templates"),
    "transformer": (
        *("sentences", "ports", "cases", "decoding", "stages", "compare", "bugs", "diagnose"),
        *("golden", "explore", "check", "distributed", "selftest", "report"),
    ),
    "apps": ("containers", "text", "checkpoints", "translate", "figures", "train"),
    "cli": (),
}
# Modules above the layers: entry points and public names, which may import from any layer.
ABOVE = {
    "__init__": 0,
    "__main__": 1,
    "plugin": 3,
    "pair": 3,
}  # maximum number of other modules that each of them imports
DATA = {"data"}
TEMPLATES = (
    "engine/report/templates",
    "pairs/templates",
    "transformer/ports/templates",
    "transformer/report/templates",
)
MOST_FILES = 10
LARGE_DIRECTORIES = {
    "cli": 22,  # one file per command or two, for long lists of options, and for code that runs before imports
    "transformer/ports": 13,  # the protocol, the four packages, user-defined ports, their matmuls, and their source
    "transformer/bugs": 15,  # one data file for each part of the catalog
    "apps/checkpoints": 11,
    "apps/checkpoints/formats": 16,  # one file for each format or its settings
}
DIRECTORIES = [
    *ROOMS,
    *(f"{room}/{name}" for room, names in ROOMS.items() for name in names if name),
    *("transformer/diagnose/evidence", "transformer/diagnose/candidates", "transformer/diagnose/measured"),
    "transformer/bugs/candidates",
    "apps/checkpoints/formats",
]


def place(module: str) -> tuple[int, int]:
    """Return the indices of a module's layer and its sub-package within it, or -1 for modules above the layers."""
    _, room, name, *_ = *module.split("."), "", ""
    if room not in ROOMS:
        return -1, -1
    order = ROOMS[room]
    beside = order.index(BESIDE) if BESIDE in order else len(order)
    return [*ROOMS].index(room), order.index(name) if name in order else beside


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports that point to a higher layer."""
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if place(module) != (-1, -1) and place(other) > place(module)
    ]


def test_every_directory_belongs_to_a_layer():
    def directories(directory: Path) -> set[str]:
        return {path.name for path in directory.iterdir() if path.is_dir() and path.name != "__pycache__"}

    assert directories(PACKAGE) - DATA == set(ROOMS)
    for room, names in ROOMS.items():
        assert directories(PACKAGE / room) == {*names} - {BESIDE}
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(ABOVE)
    assert [path.name for room in ("transformer", "apps") for path in (PACKAGE / room).glob("[!_]*.py")] == []


def test_imports_point_only_to_lower_layers():
    graph = imports(PACKAGE, types=False)
    graph = {name: others for name, others in graph.items() if ".templates." not in name}  # users copy the templates
    assert f"{PARITY}.engine.system.errors" in graph[f"{PARITY}.cli.main"]
    assert upward(graph) == []


def test_modules_have_no_indirect_circular_imports():
    assert circle(PACKAGE, types=True) == []


def test_top_level_modules_contain_only_imports():
    for name, most in ABOVE.items():
        tree = ast.parse((PACKAGE / f"{name}.py").read_text("utf-8"))
        assert sum(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body) <= most + 1
        assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body)


def test_import_from_a_higher_layer_is_detected():
    graph = {
        "p.engine.system.files": {"p.engine.processes.child", "p.transformer.ports.user", "p"},
        "p.transformer.cases.case": {"p.transformer.ports.user", "p.transformer.check.selection", "p.engine.style"},
        "p.apps.text.kinds": {"p.apps.containers.npz", "p.apps.train.run", "p.transformer.report.result"},
        "p.cli.main": {"p.engine.system.files", "p.cli.check", "p"},
        "p.engine.style": {"p.engine.system.files", "p.engine.verdict"},
    }
    assert upward(graph) == [
        "p.engine.system.files imports p.engine.processes.child",
        "p.engine.system.files imports p.transformer.ports.user",
        "p.transformer.cases.case imports p.transformer.check.selection",
        "p.apps.text.kinds imports p.apps.train.run",
    ]


@pytest.mark.parametrize("name", DIRECTORIES)
def test_subpackage_has_few_files_and_a_one_sentence_docstring(name):
    modules = [path.stem for path in (PACKAGE / name).glob("*.py") if path.stem != "__init__"]
    assert len(modules) <= LARGE_DIRECTORIES.get(name, MOST_FILES), sorted(modules)
    tree = ast.parse((PACKAGE / name / "__init__.py").read_text("utf-8"))
    sentence = ast.get_docstring(tree)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(tree.body) == 1


def test_parsed_options_stay_in_the_command_line():
    users = {path for path in PACKAGE.rglob("*.py") if "import argparse" in path.read_text("utf-8")}
    assert {path.relative_to(PACKAGE).parts[0] for path in users} == {"cli"}
