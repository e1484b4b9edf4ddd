"""``parity source``: the same piece of code from the four packages, and where it differs."""

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
COLUMN = 60  # characters that a column of code needs to be readable
MARGIN = 2  # characters before each line, with a mark where it differs
FRAME = 4 + MARGIN  # characters of each column that are border, padding and margin
MARK, MARKED = "> ", "reverse"  # without colours too, and no style of the theme

DESCRIPTION = """\
Print the same class, function, method or module of the four packages: side by
side where the terminal is wide enough, one below the other where it is not.
Highlighted are the tokens of a port that the NumPy reference does not have
("added"), and those of the reference that not all ports have ("missing"). Their
lines begin with ">"; in a pipe, a comment below each line has ^ under them.
Comments and annotations are not compared, forward, __call__ and call are one
name, and a run of tokens that stands elsewhere in the same function is the same.
Four columns need a terminal of 240 characters, two need 120.
Without a name, list what there is. No framework is imported, or needed.
"""
EXAMPLES = """\
examples:
  parity source                                the names, by module
  parity source scaled_dot_product_attention   a function
  parity source MultiHeadAttention             a class
  parity source MultiHeadAttention.forward     a method; .__call__ and .call name the same one
  parity source attention                      a whole module
  parity source LayerNorm --backends torch,tf --docstrings
  parity source EncoderLayer | less            plain Python in a pipe
  NO_COLOR=1 parity source EncoderLayer        without colours
  FORCE_COLOR=1 COLUMNS=120 parity source EncoderLayer > code.txt    a file laid out as a terminal of 120 characters
"""


class Shown(NamedTuple):
    """One package's piece of code, and which of its tokens differ."""

    piece: Piece
    marks: Marks
    note: str

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The marks, without those of strings of several lines."""
        return [(start, stop) for start, stop in self.marks.spans if "\n" not in self.piece.code[start:stop]]


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "source",
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the pieces and return the exit code."""
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
    """Yield each piece with its differences from the base: the reference, unless that has no such piece."""
    marked = compare({base: code, **{name: piece.code for name, piece in found.items()}}, base)
    for name, piece in found.items():
        title = note(marked[name], is_base=name == base)
        if name == base:
            title = f"the reference: {title}" if base == REFERENCE else "the others are compared with this"
        yield Shown(piece, marked[name], title)


def _print_plain(name: str, summary: str, shown: Sequence[Shown], absent: list[str]) -> None:
    """Print one piece below the other, as Python."""
    print(textwrap.fill(f"{name}: {summary}" if summary else name, 80, initial_indent="# ", subsequent_indent="# "))
    for one in shown:
        print(f"\n# {one.piece.place}  {one.note}\n{_pointed(one)}")
    if absent:
        print(f"\n# not in {', '.join(absent)}")


def _pointed(shown: Shown) -> str:
    """Return the code, with a comment below each line that differs which points at the tokens."""
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
    """Print as many pieces beside each other as there is room for, in rows of equal length."""
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
        needed = f"{len(shown)} columns need {len(shown) * COLUMN} characters"
        console.print(f"{needed}; this is laid out for {console.width}", style="dim")
    if absent:
        console.print(f"not in {', '.join(absent)}", style="dim")


def _highlight(shown: Shown, width: int) -> Text:
    """Colour the code, highlight what differs, and continue lines that are too long with a deeper indent."""
    coloured = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(shown.piece.code)
    for start, stop in shown.spans:
        coloured.stylize(MARKED, start, stop)
    coloured.rstrip()
    lines = (part for line in coloured.split("\n", allow_blank=True) for part in _fold(line, width))
    return Text("\n").join(Text.assemble((MARK if _is_marked(line) else " " * MARGIN, "bold"), line) for line in lines)


def _is_marked(line: Text) -> bool:
    return any(span.style == MARKED and span.end > span.start for span in line.spans)


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
