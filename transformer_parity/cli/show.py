"""``parity show`` and ``parity why``: pictures, and the measurements behind two claims of the paper."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference_numpy.presets import PRESETS
from transformer_parity.cli.options import add_backends, one_or_more
from transformer_parity.cli.progress import PlainConsole
from transformer_parity.figures import why_tables
from transformer_parity.figures.attention import TAPS, Asked, draw_attention
from transformer_parity.figures.positions import draw_masks, draw_positions
from transformer_parity.figures.style import FORMATS, OPEN_STYLE, STYLE, destination, write
from transformer_parity.figures.why_plots import draw_additive, draw_sqrt_dk
from transformer_parity.figures.why_tables import (
    measure_additive,
    measure_sqrt_dk,
    show_additive,
    show_sqrt_dk,
    threads,
)
from transformer_parity.ports.registry import PORTS
from transformer_parity.system.errors import UsageError, refusals
from transformer_parity.system.files import check_writable, write_json, write_results
from transformer_parity.system.machine import describe_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\
examples:
  parity show positions --preset paper_base,t2t_2017
  parity show masks --out pictures
  parity show attention                        every backend that is installed
  parity show attention --backends numpy,torch
  parity show attention --weights model.safetensors --which cross --layer 5 \\
      --source "The cat sleeps." --target "Die Katze schläft." --out cat.svg
"""


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "show",
        description="Draw the positional encoding, the masks, or the attention weights of a sentence pair.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    pictures = parser.add_subparsers(title="pictures", metavar="PICTURE", required=True)

    say = "the positional encoding, position by channel"
    positions = pictures.add_parser("positions", help=say, description=f"Draw {say}, one preset below the other.")
    positions.add_argument(
        "--preset",
        action=one_or_more(PRESETS),
        default=["paper_base", "t2t_2017"],
        metavar="NAME[,NAME]",
        help="conventions of layout, timescale and offset (default: paper_base,t2t_2017); `parity info` lists them",
    )
    positions.add_argument("--length", type=int, default=50, metavar="N", help="positions (default: %(default)s)")
    positions.add_argument("--d-model", type=int, default=64, metavar="N", help="channels (default: %(default)s)")
    positions.set_defaults(run=run, picture="positions", draw=_positions)

    say = "which query may attend to which key, for a padded sentence pair"
    masks = pictures.add_parser("masks", help=say, description=f"Draw {say}.")
    masks.set_defaults(run=run, picture="masks", draw=lambda options: draw_masks())

    attention = pictures.add_parser(
        "attention",
        help="the attention weights of every head, backend by backend",
        description="Draw the attention weights of every head for one pair of sentences, one row per backend, and "
        "below them how each backend differs from the first one.",
    )
    add_backends(attention, None, "those that are installed")
    attention.add_argument(
        "--weights", type=Path, metavar="FILE", help="your model (default: the one that ships, which reads dates)"
    )
    attention.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help="a small random model of these conventions instead",
    )
    attention.add_argument(
        "--source", metavar="TEXT", help="the sentence that is read (default: a date, or a line of the text that ships)"
    )
    attention.add_argument("--target", metavar="TEXT", help="the sentence that is written (default: its translation)")
    files, learn = ("SOURCE", "TARGET"), "line-aligned files to learn subwords from (default: the text that ships)"
    attention.add_argument("--text", type=Path, nargs=2, metavar=files, help=learn)
    attention.add_argument("--which", choices=TAPS, default="cross", help="which attention (default: %(default)s)")
    attention.add_argument("--layer", type=int, default=0, metavar="N", help="counted from 0 (default: %(default)s)")
    attention.add_argument(
        "--dtype", choices=("float64", "float32"), default="float32", help="of the computation (default: %(default)s)"
    )
    attention.set_defaults(run=run, picture="attention", draw=_attention)

    for picture in (positions, masks, attention):
        picture.add_argument(
            "--out", default=".", metavar="FILE|FOLDER", help="a .png or .svg file, or a folder (default: this one)"
        )
        picture.add_argument(
            "--format", choices=FORMATS, help="of the picture (default: that of the name of the file, or png)"
        )


def _positions(options: argparse.Namespace) -> Figure:
    return draw_positions(options.preset, options.length, options.d_model)


def _attention(options: argparse.Namespace) -> Figure:
    backends = options.backends or [name for name, port in PORTS.items() if port.missing() is None]
    asked = {name: getattr(options, name) for name in Asked.__dataclass_fields__}
    return draw_attention(Asked(**{**asked, "backends": backends}))


def run(options: argparse.Namespace) -> int:
    """Draw one picture, print where it is, and return the exit code."""
    import matplotlib

    path = destination(options.out, options.format, options.picture)
    if path.parent.is_dir():  # any other is made
        check_writable(path)
    with refusals(ImportError, OSError, RuntimeError, ValueError), matplotlib.rc_context(STYLE):
        write(options.draw(options), path)
    print(f"wrote {path}")
    return 0


DESCRIPTION = """\
Measure two claims of section 3.2.1 of "Attention Is All You Need" that the
paper states and does not show:

  sqrt-dk   Why are the scores divided by sqrt(d_k)? Draws queries and keys as
            in footnote 4 and measures the softmax, the gradient through it,
            and the gradient at the projections of a whole layer, with and
            without the division. Seeded: the same numbers on every machine.
  additive  Why is dot-product attention faster than additive attention, at the
            same number of multiply-adds? Counts operations, times both in turn,
            step by step, and measures memory. Timings differ by machine.
"""


WHY_EXAMPLES = """\
examples:
  parity why                          both, as tables and a sentence each
  parity why sqrt-dk                  only the first
  parity why --out pictures           also a picture of each
  OMP_NUM_THREADS=1 parity why additive --json why.json
                                      on one thread, every number into a file
"""


def add_parser_why(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "why",
        description=DESCRIPTION,
        epilog=WHY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "question",
        nargs="?",
        choices=QUESTIONS,
        metavar="sqrt-dk|additive",
        help="which claim to measure (default: both)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="draw a picture of each answer into this folder")
    parser.add_argument("--format", choices=FORMATS, default="svg", help="of the pictures (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number for machines")
    parser.set_defaults(run=run_why)


def run_why(options: argparse.Namespace) -> int:
    """Measure, print, draw, and return the exit code."""
    check_writable(options.json)
    console = PlainConsole()
    chosen = [options.question] if options.question else list(QUESTIONS)
    report: dict[str, Any] = {**describe_machine(), "threads": threads()}
    with refusals(OSError):
        if options.out is not None:
            if options.out.exists() and not options.out.is_dir():
                raise UsageError(f"--out must be a folder: {options.out} is a file")
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
    return 0


def _write_picture(draw: Callable[..., Figure], found: dict[str, Any], path: Path) -> None:
    """Draw the measurements and write the picture."""
    import matplotlib

    with matplotlib.rc_context(OPEN_STYLE):
        write(draw(**found), path)


QUESTIONS: dict[str, tuple[Callable[[], dict[str, list[Any]]], Callable[..., None], Callable[..., Figure]]] = {
    "sqrt-dk": (measure_sqrt_dk, show_sqrt_dk, draw_sqrt_dk),
    "additive": (
        measure_additive,
        show_additive,
        lambda **found: draw_additive(**found, length=why_tables.COST_LENGTH, d_k=why_tables.PAPER_D_K),
    ),
}
