"""``transformer_parity`` in sub-packages: imports run downwards, and nothing is too large to be read in one sitting."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_layout import ROOT, circle, imports

PACKAGE = ROOT / "transformer_parity"
# From the lowest to the highest: a sub-package imports those before it.
ORDER = (
    *("system", "containers", "text", "ports", "cases", "compare", "checkpoints"),
    *("mistakes", "distributed", "diagnose", "golden", "figures", "explore", "report", "check", "attacks", "bench"),
    *("translate", "train", "cli"),
)
# Modules beside the sub-packages: entry points and public names, which import from any of them.
ABOVE = {"__init__": 0, "__main__": 1, "plugin": 3}  # modules that they import from, at most
DATA = {"data", "explore/templates", "ports/templates", "report/templates"}  # read or copied, not imported

MOST_LINES, MOST_FILES, MOST_PARAMETERS = 350, 10, 6
# Files that are too long today; each may only shrink.
LONG_FILES = {
    "attacks/folders.py": 394,  # data: one entry for each attack
    "mistakes/reported.py": 445,  # data
}
LARGE_FOLDERS = {
    "ports": 11,  # generate's settings are read beside the search options, below the checkpoints that hold them
    "bench": 12,  # import_clock is a file of its own: a fresh process runs it without importing anything else
    "diagnose": 11,  # one file for each kind of evidence
    "check": 11,  # what processes are told and tell, one file for each kind of them
    "mistakes": 14,  # one file of data for each part of the catalogue
    "checkpoints/formats": 14,  # one file for each format, or for its settings
    "cli": 20,  # a file for each command or two, for long lists of options, and for what comes before any import
}
LONG_SIGNATURES = {
    "bench/peers/keras_hub.py: step": "the tensors of one decoding step, as tf.while_loop passes them",
    "compare/prefixes.py: decode": "what it overrides, the reference's, takes as many",
    "golden/writer.py: write": "the parts of a manifest",
}


def sub_package(module: str) -> str:
    """Return the part of a dotted name below the package; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports that do not run downwards."""
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if sub_package(module) in ORDER
        and sub_package(other) != sub_package(module)
        and (sub_package(other) not in ORDER[: ORDER.index(sub_package(module))] and sub_package(other) != "")
    ]


def files() -> dict[str, Path]:
    """Return the source files by their path below the package, without templates and data."""
    found = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: path for name, path in found.items() if not any(name.startswith(f"{data}/") for data in DATA)}


def signatures(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every function with the number of its parameters, without ``self`` and ``cls``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield node.name, len([one for one in parameters if one.arg not in ("self", "cls")])


def test_every_folder_has_its_place_in_the_order():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - DATA == set(ORDER)
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules == set(ABOVE)


def test_imports_run_downwards():
    graph = imports(PACKAGE, types=False)
    graph = {name: others for name, others in graph.items() if ".templates." not in name}  # which users copy
    assert "transformer_parity.engine.system.errors" in graph["transformer_parity.cli.main"]
    assert upward(graph) == []


def test_no_file_imports_itself_by_a_detour():
    assert circle(PACKAGE, types=True) == []


def test_modules_beside_the_sub_packages_hold_no_code():
    for name, most in ABOVE.items():
        tree = ast.parse((PACKAGE / f"{name}.py").read_text("utf-8"))
        assert sum(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body) <= most + 1
        assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body)


def test_an_upward_import_is_found():
    graph = {"p.system.files": {"p.ports.user"}, "p.cli.main": {"p.system.files", "p.cli.check", "p"}}
    assert upward(graph) == ["p.system.files imports p.ports.user"]


def test_files_are_short():
    long = {name: len(path.read_text("utf-8").splitlines()) for name, path in files().items()}
    long = {name: lines for name, lines in long.items() if lines > MOST_LINES}
    assert {name: lines for name, lines in long.items() if lines > LONG_FILES.get(name, 0)} == {}
    assert LONG_FILES.keys() <= long.keys()  # an exception goes when it is needed no more


def test_functions_take_few_parameters():
    long = {
        f"{name}: {function}"
        for name, path in files().items()
        for function, parameters in signatures(ast.parse(path.read_text("utf-8")))
        if parameters > MOST_PARAMETERS
    }
    assert long == set(LONG_SIGNATURES)


def test_parameters_are_counted():
    tree = ast.parse("class A:\n    def f(self, a, /, b, *c, d=1, **e): ...\nasync def g(x): ...")
    assert dict(signatures(tree)) == {"f": 3, "g": 1}


@pytest.mark.parametrize("name", [*ORDER, "checkpoints/formats"])
def test_a_sub_package_has_few_files_and_one_sentence(name):
    modules = [path.stem for path in (PACKAGE / name).glob("*.py") if path.stem != "__init__"]
    assert len(modules) <= LARGE_FOLDERS.get(name, MOST_FILES), sorted(modules)
    tree = ast.parse((PACKAGE / name / "__init__.py").read_text("utf-8"))
    sentence = ast.get_docstring(tree)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(tree.body) == 1


def test_parsed_options_stay_in_the_command_line():
    users = {name.split("/")[0] for name, path in files().items() if "import argparse" in path.read_text("utf-8")}
    assert users == {"cli"}
