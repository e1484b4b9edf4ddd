"""Size limits for files and signatures that call for a review; each exception is listed here with its reason."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

from imports import BACKENDS, PROGRAM, ROOT

MOST_LINES, MOST_LINES_OF_TESTS, MOST_PARAMETERS = 400, 500, 8
LONG_FILES = {"transformer_parity/transformer/bugs/reported.py": "data: one entry for each reported bug"}
SEARCH = "a search has more public options than that, most of which other libraries also provide"
LONG_SIGNATURES = {
    f"{package}/search.py: {search}": SEARCH
    for package in BACKENDS
    for search in ("greedy_search", "beam_search", "sample")
}
SAME_NAMES = {
    "MyPort": "each template of `parity init-port` defines this class, and a user copies only one template",
    **dict.fromkeys(
        ("Port", "Role", "RoleBlock", "RoleModel"), "`parity init-pair` copies two of these classes and renames them"
    ),
}


def sources(*directories: str) -> dict[str, str]:
    """Return the text of every Python file in some directories, by relative path."""
    paths = [path for directory in directories for path in sorted((ROOT / directory).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def longer(files: Mapping[str, str], most: int) -> dict[str, int]:
    """Return the files that have more than ``most`` lines, with their numbers of lines."""
    return {name: lines for name, text in files.items() if (lines := len(text.splitlines())) > most}


def signatures(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of parameters of every function, excluding ``self`` and ``cls``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield node.name, len([one for one in parameters if one.arg not in ("self", "cls")])


def defined_twice(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of classes that multiple files define, treating the mirrored backends as one file."""
    found: dict[str, list[str]] = defaultdict(list)
    for file, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(file)
    backends = tuple(f"{package}/" for package in BACKENDS)
    return {
        name: places
        for name, places in found.items()
        if len([place for place in places if not place.startswith(backends)])
        + any(place.startswith(backends) for place in places)
        > 1
    }


def test_package_files_stay_within_the_line_limit():
    # Remove an exception when its file no longer needs it.
    assert longer(sources(*PROGRAM), MOST_LINES).keys() == LONG_FILES.keys()


def test_line_limit_holds_for_tests_and_docs():
    assert longer(sources("tests", "docs"), MOST_LINES_OF_TESTS) == {}


def test_functions_stay_within_the_parameter_limit():
    long = {
        f"{file}: {function}"
        for file, text in sources(*PROGRAM).items()
        for function, parameters in signatures(ast.parse(text))
        if parameters > MOST_PARAMETERS
    }
    assert long == LONG_SIGNATURES.keys()


def test_class_names_are_unique():
    assert defined_twice(sources(*PROGRAM)).keys() == SAME_NAMES.keys()


def test_overlong_files_are_detected():
    assert longer({"a": "1\n2\n3\n", "b": "1\n2\n"}, 2) == {"a": 3}


def test_parameters_are_counted():
    tree = ast.parse("class A:\n    def f(self, a, /, b, *c, d=1, **e): ...\nasync def g(x): ...")
    assert dict(signatures(tree)) == {"f": 3, "g": 1}


def test_duplicate_class_name_is_detected():
    files = dict.fromkeys(("reference_numpy/a.py", "transformer_torch/a.py"), "class A: ...")
    assert defined_twice(files) == {}
    assert defined_twice({**files, "transformer_spec/b.py": "class B:\n    class A: ..."}) == {
        "A": ["reference_numpy/a.py", "transformer_torch/a.py", "transformer_spec/b.py"]
    }
    assert defined_twice({"b.py": "class B: ...", "c.py": "class B: ..."}) == {"B": ["b.py", "c.py"]}
