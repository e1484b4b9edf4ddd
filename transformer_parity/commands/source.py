"""``parity source``: the same piece of code from the four packages, side by side. Nothing is imported to read it."""

from __future__ import annotations

import argparse
import ast
import difflib
import math
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from transformer_parity.commands import add_backends
from transformer_parity.ports import PORTS

COLUMN = 60  # characters that a column of code needs to be readable
FRAME = 4  # characters of each column that are border and padding
FORWARD = ("forward", "__call__", "call")  # one method, under each framework's name for it
READING_ORDER = ("masks", "attention", "feed_forward", "embedding", "encoder", "decoder", "transformer")  # the paper's
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)

DESCRIPTION = """\
Print the same class, function, method or module of the four packages: side by
side where the terminal is wide enough, one below the other where it is not.
Without a name, list what there is. No framework is imported, or needed.
"""

EXAMPLES = """\
examples:
  parity source                                the names, by module
  parity source scaled_dot_product_attention   a function
  parity source MultiHeadAttention             a class
  parity source MultiHeadAttention.forward     a method; .__call__ and .call are the same one
  parity source attention                      a whole module
  parity source LayerNorm --backends torch,tf --docstrings
  parity source EncoderLayer | less            plain text in a pipe
"""


@dataclass(frozen=True)
class Piece:
    """A piece of one package's code."""

    place: str  # file:line
    code: str
    summary: str = ""  # the first paragraph of its docstring


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "source",
        help="the same piece of code from the four packages, side by side",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a class, function, Class.method or module")
    add_backends(parser, list(PORTS))
    parser.add_argument(
        "--docstrings",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep the docstrings in the code (default: their first paragraph stands once above it)",
    )
    parser.add_argument("--width", type=int, metavar="N", help="lay out for N characters (default: the terminal's)")
    parser.add_argument("--no-color", action="store_true", help="print without colours")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the pieces and return the exit code."""
    if options.width is not None and options.width < COLUMN:
        print(f"parity source: error: --width must be at least {COLUMN}: got {options.width}", file=sys.stderr)
        return 3
    packages = [Package(port.package) for port in PORTS.values()]
    if options.name is None:
        print(list_names(packages))
        return 0
    asked_for = [package for package in packages if package.name in {PORTS[name].package for name in options.backends}]
    pieces = [package.find(options.name, options.docstrings) for package in asked_for]
    found = [piece for piece in pieces if piece is not None]
    if not found:
        print(f"parity source: error: {_not_found(options.name, packages, asked_for)}", file=sys.stderr)
        return 3
    absent = [package.name for package, piece in zip(asked_for, pieces, strict=True) if piece is None]
    console = Console(width=options.width, no_color=options.no_color or None, highlight=False)
    summary = "" if options.docstrings else found[0].summary
    if console.is_terminal or options.width is not None:
        _print_panels(console, options.name, summary, found, absent)
    else:
        _print_plain(options.name, summary, found, absent)
    return 0


class Module:
    """One file, parsed: what it defines, by name."""

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
        """Return the public classes and functions, and the methods of those classes."""
        methods = [f"{name}.{method.name}" for name in self.public for method in _methods(self.definitions[name])]
        return [*self.public, *methods]

    def find(self, name: str, docstrings: bool) -> Piece | None:
        """Return a definition, or a method as ``Class.method``; None if there is none."""
        owner, _, method = name.partition(".")
        node = self.definitions.get(owner)
        if node is None or not method:
            return None if node is None else self.cut([node], docstrings)
        wanted = FORWARD if method in FORWARD else (method,)
        if methods := [child for child in _methods(node) if child.name in wanted]:
            return self.cut(methods, docstrings)
        if method in FORWARD and getattr(node, "bases", []):
            return Piece(f"{self.place}:{node.lineno}", f"{self.lines[node.lineno - 1]}  # inherits this method")
        return None

    def cut(self, nodes: list[Any], docstrings: bool) -> Piece:
        """Return the code of some neighbouring nodes, with or without their docstrings."""
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
        """Return the first and the last line of a node, its decorators included."""
        if isinstance(node, ast.Module):
            return 1, len(self.lines)
        decorators = getattr(node, "decorator_list", [])
        return min(part.lineno for part in (node, *decorators)), node.end_lineno

    def _docstring(self, node: ast.AST) -> range:
        """Return the lines of a node's docstring and the empty one behind it, if it holds more than that."""
        if not isinstance(node, DOCUMENTED) or ast.get_docstring(node) is None or len(node.body) == 1:
            return range(0)
        first, last = self._extent(node.body[0])
        return range(first, last + 1 if self.lines[last].strip() else last + 2)


class Package:
    """One package's modules, in the order in which they are read."""

    def __init__(self, name: str) -> None:
        self.name = name
        spec = find_spec(name)  # of a name without a dot: finds the folder and imports nothing
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"there is no package {name}")
        folder = Path(spec.submodule_search_locations[0])
        files = {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}
        order = [*(name for name in READING_ORDER if name in files), *files]
        self.modules = {name: Module(files[name]) for name in dict.fromkeys(order)}

    def find(self, name: str, docstrings: bool = False) -> Piece | None:
        """Return a module, a definition or a method; None if the package has none of that name."""
        if name in self.modules:
            return self.modules[name].cut([self.modules[name].tree], docstrings)
        found = (module.find(name, docstrings) for module in self.modules.values())
        return next((piece for piece in found if piece is not None), None)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module defines: functions, classes and, as in ``Dropout = nn.Dropout``, other names."""
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


def list_names(packages: list[Package]) -> str:
    """Return the public names of all packages by module; a star marks those that not all of them have."""
    lines = []
    modules = dict.fromkeys(name for package in packages for name in package.modules)
    for module in modules:
        files = [package.modules[module] for package in packages if module in package.modules]
        names = dict.fromkeys(name for file in files for name in file.public)
        marked = [f"{name}{'' if all(package.find(name) for package in packages) else '*'}" for name in names]
        title = f"{module}{'' if len(files) == len(packages) else '*'}:"
        lines += textwrap.wrap(f"{title:14} {', '.join(marked)}", 80, subsequent_indent=15 * " ")
    return "\n".join([*lines, "* not in all four packages"])


def _not_found(name: str, packages: list[Package], asked_for: list[Package]) -> str:
    """Say where else a name is to be found, or what it may have been meant to be."""
    if elsewhere := [package.name for package in packages if package.find(name)]:
        return f"{name} is not in {', '.join(package.name for package in asked_for)}, but in {', '.join(elsewhere)}"
    modules = [module for package in packages for module in package.modules.values()]
    known = [known for module in modules for known in module.dotted_names()]
    known = list(dict.fromkeys([*known, *(module for package in packages for module in package.modules)]))
    folded = {entry.lower(): entry for entry in known}
    methods = [entry for entry in known if entry.rpartition(".")[2].lower() == name.lower()]
    alike = [folded[entry] for entry in difflib.get_close_matches(name.lower(), folded, n=3)]
    guesses = list(dict.fromkeys([*methods, *alike]))[:3]
    meant = f"; did you mean {' or '.join(guesses)}?" if guesses else ""
    return f"there is no {name!r} in the packages{meant}\n{list_names(packages)}"


def _print_plain(name: str, summary: str, pieces: list[Piece], absent: list[str]) -> None:
    """Print one piece below the other, as Python."""
    print(textwrap.fill(f"{name}: {summary}" if summary else name, 80, initial_indent="# ", subsequent_indent="# "))
    for piece in pieces:
        print(f"\n# {piece.place}\n{piece.code}")
    if absent:
        print(f"\n# not in {', '.join(absent)}")


def _print_panels(console: Console, name: str, summary: str, pieces: list[Piece], absent: list[str]) -> None:
    """Print as many pieces beside each other as there is room for, in rows of equal length."""
    side_by_side = max(1, min(len(pieces), console.width // COLUMN))
    side_by_side = math.ceil(len(pieces) / math.ceil(len(pieces) / side_by_side))
    code = [_highlight(piece.code, console.width // side_by_side - FRAME) for piece in pieces]
    grid = Table.grid(expand=True)
    for _ in range(side_by_side):
        grid.add_column(ratio=1)
    for start in range(0, len(pieces), side_by_side):
        row = range(start, min(start + side_by_side, len(pieces)))
        height = max(len(code[i].split("\n")) for i in row) + 2
        grid.add_row(*(Panel(code[i], title=pieces[i].place, title_align="left", height=height) for i in row))
    console.print(Text.assemble((name, "bold"), f"  {summary}" if summary else ""))
    console.print(grid)
    if absent:
        console.print(f"not in {', '.join(absent)}", style="dim")


def _highlight(code: str, width: int) -> Text:
    """Colour the code, and continue lines that are too long with a deeper indent."""
    coloured = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(code)
    coloured.rstrip()
    return Text("\n").join(part for line in coloured.split("\n", allow_blank=True) for part in _fold(line, width))


def _fold(line: Text, width: int) -> Iterator[Text]:
    """Break a line where it has a space, or else an opening bracket, so that it fits."""
    indent = min(len(line.plain) - len(line.plain.lstrip()) + 4, width // 2)
    while len(line) > width:
        places = (line.plain.rfind(character, indent, width) + 1 for character in " (")
        cut = next((place for place in places if place), width)
        first, line = line.divide([cut])
        yield first
        line = Text(indent * " ") + line
    yield line
