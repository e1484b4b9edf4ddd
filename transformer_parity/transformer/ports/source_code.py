"""Find the source code of modules, classes, and functions in the four packages without importing the packages."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FORWARD = ("forward", "__call__", "call")  # the frameworks' names for the forward method
READING_ORDER = ("masks", "attention", "feed_forward", "embedding", "encoder", "decoder", "transformer")  # as in paper
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


@dataclass(frozen=True)
class Piece:
    """A piece of source code from one package.

    Attributes:
        place: Position of the code as ``file:line``.
        code: Source code.
        summary: First paragraph of the docstring.
    """

    place: str
    code: str
    summary: str = ""


class Module:
    """A parsed source file and a dict from names to its definitions."""

    def __init__(self, path: Path) -> None:
        text = path.read_text("utf-8")
        self.place = f"{path.parent.name}/{path.name}"
        self.lines = text.splitlines()
        self.tree = ast.parse(text)
        self.definitions = dict(_definitions(self.tree))
        self.public = [
            name for name, node in self.definitions.items() if isinstance(node, DOCUMENTED) and not name.startswith("_")
        ]

    def dotted_names(self) -> list[str]:
        """Return the names of the public classes and functions, followed by ``Class.method`` for each method."""
        methods = [f"{name}.{method.name}" for name in self.public for method in _methods(self.definitions[name])]
        return [*self.public, *methods]

    def find(self, name: str, docstrings: bool) -> Piece | None:
        """Return the code of a definition or a ``Class.method``, or None if the file doesn't contain the name."""
        owner, _, method = name.partition(".")
        node = self.definitions.get(owner)
        if node is None or not method:
            return None if node is None else self.cut([node], docstrings)
        if methods := self._method(node, FORWARD if method in FORWARD else (method,)):
            return self.cut(methods, docstrings)
        if method in FORWARD and getattr(node, "bases", []):
            header = f"{self.lines[node.lineno - 1]} ...  # inherits its forward method"
            return Piece(f"{self.place}:{node.lineno}", header)
        return None

    def _method(self, node: Any, wanted: tuple[str, ...]) -> list[ast.FunctionDef]:
        """Return the methods with one of the wanted names.

        Also search aliases in the class, such as ``forward = encode``, and base classes in the same file.
        """
        names = {*wanted, *(value for name, value in _aliases(node) if name in wanted)}
        if methods := [child for child in _methods(node) if child.name in names]:
            return methods
        bases = [self.definitions.get(base.id) for base in getattr(node, "bases", []) if isinstance(base, ast.Name)]
        return next((methods for base in bases if (methods := self._method(base, wanted))), [])

    def cut(self, nodes: list[Any], docstrings: bool) -> Piece:
        """Return the code of adjacent nodes, with or without their docstrings."""
        blocks = []
        for node in nodes:
            hidden = set() if docstrings else {number for part in ast.walk(node) for number in self._docstring(part)}
            first, last = self._extent(node)
            kept = [self.lines[number - 1] for number in range(first, last + 1) if number not in hidden]
            blocks.append(textwrap.dedent("\n".join(kept)).strip("\n"))
        summary = (ast.get_docstring(nodes[0]) or "") if isinstance(nodes[0], DOCUMENTED) else ""
        place = f"{self.place}:{self._extent(nodes[0])[0]}"
        return Piece(place, "\n\n".join(blocks), " ".join(summary.partition("\n\n")[0].split()))

    def _extent(self, node: Any) -> tuple[int, int]:
        """Return the first and the last line of a node, including its decorators."""
        if isinstance(node, ast.Module):
            return 1, len(self.lines)
        decorators = getattr(node, "decorator_list", [])
        return min(part.lineno for part in (node, *decorators)), node.end_lineno

    def _docstring(self, node: ast.AST) -> range:
        """Return the line numbers of a node's docstring and the following empty line.

        The range is empty if the docstring is the entire body.
        """
        if not isinstance(node, DOCUMENTED) or ast.get_docstring(node) is None or len(node.body) == 1:
            return range(0)
        first, last = self._extent(node.body[0])
        return range(first, last + 1 if self.lines[last].strip() else last + 2)


class SourcePackage:
    """The modules of one package, in reading order."""

    def __init__(self, name: str) -> None:
        self.name = name
        spec = find_spec(name)  # finds the directory of a top-level package without importing it
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"the package {name} is not installed")
        directory = Path(spec.submodule_search_locations[0])
        files = {path.stem: path for path in sorted(directory.glob("[!_]*.py"))}
        order = [*(name for name in READING_ORDER if name in files), *files]
        self.modules = {name: Module(files[name]) for name in dict.fromkeys(order)}

    def find(self, name: str, docstrings: bool = False) -> Piece | None:
        """Return the code of a module, definition, or method, or None if the package doesn't contain the name."""
        if name in self.modules:
            return self.modules[name].cut([self.modules[name].tree], docstrings)
        found = (module.find(name, docstrings) for module in self.modules.values())
        return next((piece for piece in found if piece is not None), None) or self._inherited(name, docstrings)

    def _inherited(self, name: str, docstrings: bool) -> Piece | None:
        """Return the code of a method that a class inherits from a base class in a different file, or None."""
        owner, _, method = name.partition(".")
        nodes = (module.definitions.get(owner) for module in self.modules.values())
        bases = [base.id for node in nodes for base in getattr(node, "bases", []) if isinstance(base, ast.Name)]
        found = (self.find(f"{base}.{method}", docstrings) for base in bases if method and base != owner)
        return next((piece for piece in found if piece is not None), None)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and node of each function, each class, and each assignment such as ``X = nn.Dropout``."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def _methods(node: ast.AST) -> list[ast.FunctionDef]:
    return (
        [child for child in node.body if isinstance(child, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
    )


def _aliases(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the aliases that a class defines, as pairs of alias and original name."""
    for child in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(child, ast.Assign) and isinstance(child.value, ast.Name):
            yield from ((target.id, child.value.id) for target in child.targets if isinstance(target, ast.Name))


def list_names(packages: list[SourcePackage]) -> str:
    """List the public names by module, as text. A star marks names that some packages don't define."""
    lines = []
    modules = dict.fromkeys(name for package in packages for name in package.modules)
    for module in modules:
        files = [package.modules[module] for package in packages if module in package.modules]
        names = dict.fromkeys(name for file in files for name in file.public)
        marked = [f"{name}{'' if all(package.find(name) for package in packages) else '*'}" for name in names]
        title = f"{module}{'' if len(files) == len(packages) else '*'}:"
        lines += textwrap.wrap(f"{title:14} {', '.join(marked)}", 80, subsequent_indent=15 * " ")
    return "\n".join([*lines, "* not in all four packages"])


def not_found(name: str, packages: list[SourcePackage], asked_for: list[SourcePackage]) -> str:
    """Return an error message for an unknown name.

    The message lists the other packages that define the name. If there are none, it suggests similar names. If there
    are no similar names either, it lists all names.
    """
    if elsewhere := [package.name for package in packages if package.find(name)]:
        return f"{name} is not in {', '.join(package.name for package in asked_for)}, but in {', '.join(elsewhere)}"
    modules = [module for package in packages for module in package.modules.values()]
    known = [known for module in modules for known in module.dotted_names()]
    known = list(dict.fromkeys([*known, *(module for package in packages for module in package.modules)]))
    folded = {entry.lower(): entry for entry in known}
    methods = [entry for entry in known if entry.rpartition(".")[2].lower() == name.lower()]
    alike = [folded[entry] for entry in difflib.get_close_matches(name.lower(), folded, n=3)]
    guesses = list(dict.fromkeys([*methods, *alike]))[:3]
    absent = f"none of the packages defines {name!r}"
    if guesses:
        return f"{absent}; did you mean {' or '.join(guesses)}?\nRun `parity source` without a name to list all names"
    return f"{absent}\n{list_names(packages)}"
