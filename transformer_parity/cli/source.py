"""``parity source``: print the same code from the four packages, and highlight the differences."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from transformer_parity.cli.options import add_backends
from transformer_parity.cli.progress import PlainConsole
from transformer_parity.engine.system.errors import UsageError
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.source_code import Piece, SourcePackage, list_names, not_found
from transformer_parity.transformer.ports.source_marks import Marks, compare, note

REFERENCE = PORTS["numpy"].package
COLUMN = 60  # minimum width of a readable column of code, in characters
MARGIN = 2  # width in characters of the margin, which marks lines that differ
FRAME = 4 + MARGIN  # width of the border, padding, and margin of a column, in characters
# The characters in the margin of a line with marked tokens, and the style of the marked tokens. Both are visible
# without colors, and the syntax theme doesn't use this style for any other tokens.
MARK, MARKED = "> ", "reverse"

DESCRIPTION = """\
Print the same class, function, method, or module from the four packages. The code
of the packages appears side by side if the terminal is wide enough (240 characters
for four columns, 120 for two), otherwise one below the other.

In a port, tokens are highlighted if the NumPy reference doesn't contain them
("added"). In the reference, tokens are highlighted if a port doesn't contain them
("missing"). Lines with highlighted tokens start with ">". If the output is not a
terminal, a comment below each line marks these tokens with ^. The comparison
ignores comments and annotations, and treats forward, __call__, and call as the
same name. A sequence of at least four tokens also matches if it appears
elsewhere in the same function.

Without NAME, list all available names. No framework is imported or required.
"""
EXAMPLES = """\
examples:
  parity source                                list the names by module
  parity source scaled_dot_product_attention   print a function
  parity source MultiHeadAttention             print a class
  parity source MultiHeadAttention.forward     print a method (.__call__ and .call select the same one)
  parity source attention                      print an entire module
  parity source LayerNorm --backends torch,tf --docstrings
  parity source EncoderLayer | less            print plain Python
  NO_COLOR=1 parity source EncoderLayer        print without colors
  FORCE_COLOR=1 COLUMNS=120 parity source EncoderLayer > code.txt    write columns for a width of 120 characters
"""


class Shown(NamedTuple):
    """The code of one package, marks for the tokens that differ between packages, and a note."""

    piece: Piece
    marks: Marks
    note: str

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The positions of the marks, excluding marks in multi-line strings."""
        return [(start, stop) for start, stop in self.marks.spans if "\n" not in self.piece.code[start:stop]]


def add_parser(commands: Any) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "source",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this class, function, Class.method, or module")
    add_backends(parser, list(PORTS))
    parser.add_argument(
        "--docstrings",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="print the full docstrings with the code (default: print only the first paragraph, once above the code)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the requested code from each package, and return the exit code."""
    packages = [SourcePackage(port.package) for port in PORTS.values()]
    if options.name is None:
        print(list_names(packages))
        return 0
    asked_for = [package for package in packages if package.name in {PORTS[name].package for name in options.backends}]
    pieces = {package.name: package.find(options.name, options.docstrings) for package in packages}
    found = {package.name: piece for package in asked_for if (piece := pieces[package.name]) is not None}
    if not found:
        raise UsageError(*not_found(options.name, packages, asked_for).split("\n"))
    absent = [package.name for package in asked_for if package.name not in found]
    reference = pieces[REFERENCE]
    base = next(iter(found)) if reference is None else REFERENCE
    shown = list(_compared(found, base, (reference or found[base]).code))
    console = PlainConsole()
    summary = "" if options.docstrings else next(iter(found.values())).summary
    if console.is_terminal:
        _print_panels(console, options.name, summary, shown, absent)
    else:
        _print_plain(options.name, summary, shown, absent)
    return 0


def _compared(found: dict[str, Piece], base: str, code: str) -> Iterator[Shown]:
    """Yield the code of each package, with marks at the differences from the base.

    The base is the code in the reference or, if the reference doesn't contain the name, the code in the first package.
    """
    marked = compare({base: code, **{name: piece.code for name, piece in found.items()}}, base)
    for name, piece in found.items():
        title = note(marked[name], is_base=name == base)
        if name == base:
            title = f"reference: {title}" if base == REFERENCE else "base of the comparison"
        yield Shown(piece, marked[name], title)


def _print_plain(name: str, summary: str, shown: Sequence[Shown], absent: list[str]) -> None:
    """Print the code of each package as valid Python, one package after another."""
    print(textwrap.fill(f"{name}: {summary}" if summary else name, 80, initial_indent="# ", subsequent_indent="# "))
    for one in shown:
        print(f"\n# {one.piece.place}  {one.note}\n{_pointed(one)}")
    if absent:
        print(f"\n# not in {', '.join(absent)}")


def _pointed(shown: Shown) -> str:
    """Return the code. Below each line with marked tokens, insert a comment that underlines the tokens with ``^``."""
    lines, start = [], 0
    for line in shown.piece.code.split("\n"):
        lines.append(line)
        stop = start + len(line)
        carets = [" "] * len(line)
        for first, last in shown.spans:
            carets[max(first, start) - start : max(min(last, stop) - start, 0)] = "^" * max(
                0, min(last, stop) - max(first, start)
            )
        if "^" in carets:
            lines.append("#" + "".join(carets)[1:].rstrip())
        start = stop + 1
    return "\n".join(lines)


def _print_panels(console: PlainConsole, name: str, summary: str, shown: Sequence[Shown], absent: list[str]) -> None:
    """Print the code of each package in a panel. Arrange the panels in as few rows as the terminal width allows."""
    side_by_side = max(1, min(len(shown), console.width // COLUMN))
    side_by_side = math.ceil(len(shown) / math.ceil(len(shown) / side_by_side))
    code = [_highlight(one, console.width // side_by_side - FRAME) for one in shown]
    grid = Table.grid(expand=True)
    for _ in range(side_by_side):
        grid.add_column(ratio=1)
    for start in range(0, len(shown), side_by_side):
        row = range(start, min(start + side_by_side, len(shown)))
        height = max(len(code[i].split("\n")) for i in row) + 2
        grid.add_row(
            *(
                Panel(code[i], title=shown[i].piece.place, subtitle=shown[i].note, title_align="left", height=height)
                for i in row
            )
        )
    console.print(Text.assemble((name, "bold"), f"  {summary}" if summary else ""))
    console.print(grid)
    if side_by_side < len(shown):
        needed = f"{len(shown)} columns require a width of {len(shown) * COLUMN} characters"
        console.print(f"{needed}; this terminal has {console.width}", style="dim")
    if absent:
        console.print(f"not in {', '.join(absent)}", style="dim")


def _highlight(shown: Shown, width: int) -> Text:
    """Color the code, highlight the differences, and wrap long lines with a deeper indent."""
    colored = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(shown.piece.code)
    for start, stop in shown.spans:
        colored.stylize(MARKED, start, stop)
    colored.rstrip()
    lines = (part for line in colored.split("\n", allow_blank=True) for part in _fold(line, width))
    return Text("\n").join(Text.assemble((MARK if _is_marked(line) else " " * MARGIN, "bold"), line) for line in lines)


def _is_marked(line: Text) -> bool:
    return any(span.style == MARKED and span.end > span.start for span in line.spans)


def _fold(line: Text, width: int) -> Iterator[Text]:
    """Wrap a line to the given width at a space or, if there is none, after an opening parenthesis."""
    indent = min(len(line.plain) - len(line.plain.lstrip()) + 4, width // 2)
    while len(line) > width:
        places = (line.plain.rfind(character, indent, width) + 1 for character in " (")
        cut = next((place for place in places if place), width)
        first, line = line.divide([cut])
        yield first
        line = Text(indent * " ") + line
    yield line
