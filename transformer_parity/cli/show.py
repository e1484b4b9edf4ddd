"""``parity show``: draw positional encodings, masks, and attention weights."""

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
  parity show attention                        draw every installed backend
  parity show attention --backends numpy,torch
  parity show attention --weights model.safetensors --which cross --layer 5 \\
      --source "The cat sleeps." --target "Die Katze schläft." --out cat.svg

If a weight file contains no vocabulary, or a vocabulary that requires --from and --to, the model runs on subwords
learned from the included text. To see the attention of such a multilingual model on its own tokens, use
`parity explore --from CODE --to CODE`.
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options to the parser."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "show",
        description="Draw positional encodings, masks, or the attention weights for a sentence pair. "
        "`parity show PICTURE --help` lists the options of each picture.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    pictures = parser.add_subparsers(title="pictures", metavar="PICTURE", required=True)

    positions = pictures.add_parser(
        "positions",
        help="draw the positional encodings of presets",
        description="Draw the positional encoding (position by channel) of each preset, one below the other.",
    )
    positions.add_argument(
        "--preset",
        action=one_or_more(PRESETS),
        default=["paper_base", "t2t_2017"],
        metavar="NAME[,NAME]",
        help="draw the encodings of these presets, which differ in layout, timescale, and offset; `parity info` lists "
        "all presets (default: paper_base,t2t_2017)",
    )
    positions.add_argument(
        "--size",
        type=_size,
        default=(50, 64),
        metavar="LENGTHxCHANNELS",
        help="draw this many positions and channels (default: 50x64)",
    )
    positions.set_defaults(run=run, picture="positions", draw=_positions)

    masks = pictures.add_parser(
        "masks",
        help="draw the attention masks of a padded sentence pair",
        description="Draw the attention masks of a padded sentence pair. They show the keys that each query may attend "
        "to.",
    )
    masks.set_defaults(run=run, picture="masks", draw=lambda options: draw_masks())

    attention = pictures.add_parser(
        "attention",
        help="draw the attention weights of every head in each backend",
        description="Draw the attention weights of every head for one sentence pair, one row per backend, followed by "
        "the difference between each backend and the first one.",
    )
    add_backends(attention, None, "all that are installed")
    attention.add_argument(
        "--weights", type=Path, metavar="FILE", help="use this weight file (default: the included date model)"
    )
    attention.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help="use a small random model with the conventions of this preset instead of a weight file",
    )
    attention.add_argument(
        "--source",
        type=sentence,
        metavar="TEXT",
        help="use this source sentence (default: a date for the included date model, otherwise a line of the included "
        "text)",
    )
    attention.add_argument(
        "--target",
        type=sentence,
        metavar="TEXT",
        help="use this target sentence (default: the model's translation)",
    )
    attention.add_argument(
        "--which", choices=TAPS, default="cross", help="draw this kind of attention (default: %(default)s)"
    )
    attention.add_argument(
        "--layer", type=int, default=0, metavar="N", help="draw layer N, counting from 0 (default: %(default)s)"
    )
    attention.add_argument(
        "--dtype", choices=("float64", "float32"), default="float32", help="run in this dtype (default: %(default)s)"
    )
    attention.set_defaults(run=run, picture="attention", draw=_attention)

    for picture in (positions, masks, attention):
        picture.add_argument(
            "--out",
            default=".",
            metavar="FILE|DIR",
            help="write to this .png or .svg file, or to a .png file in this directory (default: current directory)",
        )


def _positions(options: argparse.Namespace) -> Figure:
    return draw_positions(options.preset, *options.size)


def _size(text: str) -> tuple[int, int]:
    """Parse two positive integers, such as ``50x64``, for argparse."""
    length, _, channels = text.partition("x")
    return positive(length), positive(channels)


def _attention(options: argparse.Namespace) -> Figure:
    backends = options.backends or [name for name, port in PORTS.items() if port.missing() is None]
    asked = {name: getattr(options, name) for name in Asked.__dataclass_fields__}
    return draw_attention(Asked(**{**asked, "backends": backends}))


def run(options: argparse.Namespace) -> int:
    """Draw one picture, print its path, and return the exit code."""
    import matplotlib

    path = destination(options.out, options.picture)
    if path.parent.is_dir():  # if the directory is missing, ``write`` creates it
        check_writable(path)
    with refusals(ImportError, OSError, RuntimeError, ValueError), matplotlib.rc_context(STYLE):
        write(options.draw(options), path)
    print(f"wrote {path}")
    return 0
