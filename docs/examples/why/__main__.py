"""Test two claims of section 3.2.1. For the options, run ``python docs/examples/why --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tables
from plots import draw_additive, draw_sqrt_dk
from tables import measure_additive, measure_sqrt_dk, show_additive, show_sqrt_dk, threads

from transformer_parity.cli.progress import PlainConsole
from transformer_parity.engine.style import FORMATS, OPEN_STYLE, write
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import check_writable, write_json, write_results
from transformer_parity.engine.system.machine import describe_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DESCRIPTION = """\
Measure two claims that section 3.2.1 of "Attention Is All You Need" makes
without evidence:

  sqrt-dk   Why are the scores divided by sqrt(d_k)? Generates queries and keys
            as in footnote 4 and measures the softmax, the gradient through it,
            and the gradient at the projections of a complete layer, with and
            without the division. The numbers are seeded and the same on every
            machine.
  additive  Why is dot-product attention faster than additive attention, with
            the same number of multiply-adds? Counts operations, times both
            functions and their steps in turn, and measures memory. The times
            differ between machines.
"""


WHY_EXAMPLES = """\
examples:
  python docs/examples/why                          print tables and conclusions for both claims
  python docs/examples/why sqrt-dk                  measure only the first claim
  python docs/examples/why --out pictures           also draw a figure for each claim
  OMP_NUM_THREADS=1 python docs/examples/why additive --json why.json
                                      use one thread, and write all numbers to a file
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser for the command line."""
    parser = argparse.ArgumentParser(
        prog="python docs/examples/why",
        description=DESCRIPTION,
        epilog=WHY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "question",
        nargs="?",
        choices=QUESTIONS,
        metavar="sqrt-dk|additive",
        help="claim to measure (default: both)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="draw a figure for each claim into this directory")
    parser.add_argument("--format", choices=FORMATS, default="svg", help="format of the figures (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers as JSON")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Test the chosen claims, print the measurements, draw the figures, and return the exit code."""
    options = parser().parse_args(arguments)
    try:
        answer(options)
    except UsageError as error:
        parser().exit(2, f"python docs/examples/why: error: {error}\n")
    return 0


def answer(options: argparse.Namespace) -> None:
    """Measure, print, and draw the chosen claims.

    Raises:
        UsageError: If a file or directory can't be written.
    """
    check_writable(options.json)
    console = PlainConsole()
    chosen = [options.question] if options.question else list(QUESTIONS)
    report: dict[str, Any] = {**describe_machine(), "threads": threads()}
    with refusals(OSError):
        if options.out is not None:
            if options.out.exists() and not options.out.is_dir():
                raise UsageError(f"--out must be a directory: {options.out} is a file")
            options.out.mkdir(parents=True, exist_ok=True)
        for question in chosen:
            measure, show, draw = QUESTIONS[question]
            found = measure()
            show(console, **found)
            report[question] = {name: [asdict(entry) for entry in entries] for name, entries in found.items()}
            if options.out is not None:
                path = options.out / f"why-{question}.{options.format}"
                _write_picture(draw, found, path)
                console.print(f"{path}\n", soft_wrap=True)
    write_results(report, (options.json, write_json))


def _write_picture(draw: Callable[..., Figure], found: dict[str, Any], path: Path) -> None:
    """Draw the measurements, and write the figure to a file."""
    import matplotlib

    with matplotlib.rc_context(OPEN_STYLE):
        write(draw(**found), path)


QUESTIONS: dict[str, tuple[Callable[[], dict[str, list[Any]]], Callable[..., None], Callable[..., Figure]]] = {
    "sqrt-dk": (measure_sqrt_dk, show_sqrt_dk, draw_sqrt_dk),
    "additive": (
        measure_additive,
        show_additive,
        lambda **found: draw_additive(**found, length=tables.COST_LENGTH, d_k=tables.PAPER_D_K),
    ),
}

if __name__ == "__main__":
    sys.exit(main())
