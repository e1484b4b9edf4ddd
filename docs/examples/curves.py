"""Draw the training curves of multiple runs in one figure.

    python docs/examples/curves.py runs/dates-torch runs/dates-jax runs/dates-tf --out dates.png

Each run must use a different backend. The figure shows the training loss, the held-out loss, and the score that `parity
train` logged for each run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from transformer_parity.apps.train.curves import draw, read_runs
from transformer_parity.engine.style import FORMATS
from transformer_parity.engine.system.errors import UsageError


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories that `parity train` wrote")
    parser.add_argument("--out", type=Path, default=Path("curve.png"), metavar="FILE", help="PNG or SVG file to write")
    options = parser.parse_args(arguments)
    if options.out.suffix.removeprefix(".") not in FORMATS:
        parser.error(f"--out must end in .png or .svg: got {options.out}")
    try:
        draw(read_runs(options.runs), options.out)
    except (OSError, UsageError) as error:
        parser.error(str(error))
    print(options.out)


if __name__ == "__main__":
    main()
