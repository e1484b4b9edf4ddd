"""``parity info`` and ``parity source``: machine, backends, presets, names; and the code of the packages."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from reference_numpy import PRESETS
from reference_numpy.names import parameter_shapes, tap_shapes
from transformer_parity.cases.case import tiny
from transformer_parity.cases.inputs import BATCH, SOURCE, TARGET
from transformer_parity.cli.options import add_backends
from transformer_parity.cli.progress import PlainConsole
from transformer_parity.ports.package import PackagePort
from transformer_parity.ports.registry import PORTS
from transformer_parity.ports.source_code import Package, Piece, list_names, not_found
from transformer_parity.report.presets import PAPER_VOCABULARY, describe_presets, print_presets
from transformer_parity.system.environment import quiet_frameworks
from transformer_parity.system.errors import UsageError, printable
from transformer_parity.system.machine import describe_machine

DESCRIPTION = """\
Show this machine, what is installed of the four backends, and every preset:
how many parameters it has, and how it differs from the paper's base model.
"""
EXAMPLES = """\
examples:
  parity info                  everything, as tables
  parity info --vocab 8000     the presets' sizes at another vocabulary
  parity info --json           the same for programs; put it into a bug report
  parity info --names marian   every parameter and every tap of a preset, with its shape
"""


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "info",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--vocab",
        type=int,
        default=PAPER_VOCABULARY,
        metavar="N",
        help="the vocabulary at which parameters are counted (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--names",
        nargs="?",
        const="paper_base",
        choices=PRESETS,
        metavar="PRESET",
        help="print the canonical names of parameters and taps instead, with their shapes in the standard cases",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print machine, backends and presets, and return the exit code."""
    if options.names is not None:
        print_names(options.names, as_json=options.json)
        return 0
    try:
        presets = describe_presets(options.vocab)
    except ValueError as error:
        raise UsageError(f"--vocab {options.vocab}: {error}") from error
    backends = {}
    with quiet_frameworks() as terminal, Console(file=terminal).status("") as spinner:
        for name, port in PORTS.items():
            spinner.update(f"importing {port.package}")
            backends[name] = describe_backend(port)
    machine = describe_machine()
    if options.json:
        report = {**machine, "backends": backends, "vocab_size": options.vocab, "presets": presets}
        print(json.dumps(report, indent=2))
        return 0
    console = PlainConsole()
    _print_machine(console, machine)
    _print_backends(console, backends)
    print_presets(console, presets, options.vocab)
    return 0


def print_names(preset: str, *, as_json: bool) -> None:
    """Print every parameter and every tap of a preset, with its shape at B 4, S 9, T 7, two layers a side."""
    config = tiny(preset, d_k=None, d_v=None)
    names = {"parameters": parameter_shapes(config), "taps": tap_shapes(config, BATCH, SOURCE, TARGET)}
    if as_json:
        print(json.dumps({kind: {name: list(shape) for name, shape in of.items()} for kind, of in names.items()}))
        return
    console = PlainConsole()
    for kind, shapes in names.items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(kind, no_wrap=True)
        table.add_column("shape", no_wrap=True)
        for name, shape in shapes.items():
            table.add_row(name, str(list(shape)))
        console.print(table)


def describe_backend(port: PackagePort) -> dict[str, Any]:
    """Return what is installed of a backend: versions, devices and switches, or how to install it."""
    if missing := port.missing():
        return {"installed": False, "missing": missing, "install": port.install}
    try:
        package = port.import_package()
        described = package.describe()
    except Exception as error:  # a broken installation may raise anything: it is shown
        return {"installed": True, "error": f"{type(error).__name__}: {error}"}
    return {
        "installed": True,
        **described,
        "dtypes": list(package.runtime.DTYPES),
        "runs on": list(package.runtime.DEVICES),
    }


def _print_machine(console: Console, machine: dict[str, Any]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, value in machine.items():
        grid.add_row(Text(name, "bold"), str(value))
    console.print(grid)


def _print_backends(console: Console, backends: dict[str, dict[str, Any]]) -> None:
    """Print one column per backend, so that they can be compared row by row."""
    console.print()
    table = Table(title="Backends", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in backends:
        table.add_column(name, overflow="fold")
    working = {name: found for name, found in backends.items() if "version" in found}
    rows = dict.fromkeys(row for found in working.values() for row in found if row != "installed")
    for row in rows:
        cells = (_cell(found.get(row, "-")) if name in working else "" for name, found in backends.items())
        table.add_row(row, *cells)
    if not_working := [name for name in backends if name not in working]:
        marks = {name: "fails" if backends[name]["installed"] else "not installed" for name in not_working}
        table.add_row("", *(Text(marks.get(name, ""), "red") for name in backends))
    console.print(table)
    said = "Switches stand as each framework sets them on import; a check sets them to its precision."
    console.print(said, style="dim")
    for name, found in backends.items():
        if not found["installed"]:
            console.print(f"{name}: {found['missing']} is not installed. {found['install']}", soft_wrap=True)
        elif "error" in found:
            console.print(f"{name}: installed, but it fails: {printable(found['error'])}", style="red")


def _cell(value: Any) -> str:
    return "\n".join(value) if isinstance(value, list) else str(value).replace(", ", "\n")


COLUMN = 60  # characters that a column of code needs to be readable
FRAME = 4  # characters of each column that are border and padding


SOURCE_DESCRIPTION = """\
Print the same class, function, method or module of the four packages: side by
side where the terminal is wide enough, one below the other where it is not.
Without a name, list what there is. No framework is imported, or needed.
"""


SOURCE_EXAMPLES = """\
examples:
  parity source                                the names, by module
  parity source scaled_dot_product_attention   a function
  parity source MultiHeadAttention             a class
  parity source MultiHeadAttention.forward     a method; .__call__ and .call are the same one
  parity source attention                      a whole module
  parity source LayerNorm --backends torch,tf --docstrings
  parity source EncoderLayer | less            plain text in a pipe
"""


def add_parser_source(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "source",
        description=SOURCE_DESCRIPTION,
        epilog=SOURCE_EXAMPLES,
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
    parser.set_defaults(run=run_source)


def run_source(options: argparse.Namespace) -> int:
    """Print the pieces and return the exit code."""
    if options.width is not None and options.width < COLUMN:
        raise UsageError(f"--width must be at least {COLUMN}: got {options.width}")
    packages = [Package(port.package) for port in PORTS.values()]
    if options.name is None:
        print(list_names(packages))
        return 0
    asked_for = [package for package in packages if package.name in {PORTS[name].package for name in options.backends}]
    pieces = [package.find(options.name, options.docstrings) for package in asked_for]
    found = [piece for piece in pieces if piece is not None]
    if not found:
        raise UsageError(*not_found(options.name, packages, asked_for).split("\n"))
    absent = [package.name for package, piece in zip(asked_for, pieces, strict=True) if piece is None]
    console = PlainConsole(width=options.width, no_color=options.no_color or None)
    summary = "" if options.docstrings else found[0].summary
    if console.is_terminal or options.width is not None:
        _print_panels(console, options.name, summary, found, absent)
    else:
        _print_plain(options.name, summary, found, absent)
    return 0


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
