"""``parity show``: pictures of positions, masks and attention weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_parity.apps.figures.attention import TAPS, Asked, draw_attention
from transformer_parity.apps.figures.positions import draw_masks, draw_positions
from transformer_parity.cli.options import add_backends, one_or_more, positive, sentence
from transformer_parity.engine.style import STYLE, destination, write
from transformer_parity.engine.system.errors import refusals
from transformer_parity.engine.system.files import check_writable
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.presets import PRESETS

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

A model without a vocabulary, or with one for several languages, is run on subwords that are learned from the text
that ships. `parity explore --from CODE --to CODE` shows the attention of such a model in its own tokens.
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
    positions.add_argument(
        "--size",
        type=_size,
        default=(50, 64),
        metavar="LENGTHxCHANNELS",
        help="positions by channels of the model (default: 50x64)",
    )
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
        "--source",
        type=sentence,
        metavar="TEXT",
        help="the sentence that is read (default: a date, or a line of the text that ships)",
    )
    attention.add_argument(
        "--target",
        type=sentence,
        metavar="TEXT",
        help="the sentence that is written (default: the model's translation)",
    )
    attention.add_argument("--which", choices=TAPS, default="cross", help="which attention (default: %(default)s)")
    attention.add_argument("--layer", type=int, default=0, metavar="N", help="counted from 0 (default: %(default)s)")
    attention.add_argument(
        "--dtype", choices=("float64", "float32"), default="float32", help="of the computation (default: %(default)s)"
    )
    attention.set_defaults(run=run, picture="attention", draw=_attention)

    for picture in (positions, masks, attention):
        picture.add_argument(
            "--out",
            default=".",
            metavar="FILE|FOLDER",
            help="a .png or .svg file, or a folder for a .png file (default: this one)",
        )


def _positions(options: argparse.Namespace) -> Figure:
    return draw_positions(options.preset, *options.size)


def _size(text: str) -> tuple[int, int]:
    """Return an argparse value: two positive integers."""
    length, _, channels = text.partition("x")
    return positive(length), positive(channels)


def _attention(options: argparse.Namespace) -> Figure:
    backends = options.backends or [name for name, port in PORTS.items() if port.missing() is None]
    asked = {name: getattr(options, name) for name in Asked.__dataclass_fields__}
    return draw_attention(Asked(**{**asked, "backends": backends}))


def run(options: argparse.Namespace) -> int:
    """Draw one picture, print where it is, and return the exit code."""
    import matplotlib

    path = destination(options.out, options.picture)
    if path.parent.is_dir():  # any other is made
        check_writable(path)
    with refusals(ImportError, OSError, RuntimeError, ValueError), matplotlib.rc_context(STYLE):
        write(options.draw(options), path)
    print(f"wrote {path}")
    return 0
