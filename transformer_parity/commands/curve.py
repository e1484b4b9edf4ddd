"""``parity curve``: the curves of several training runs in one picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformer_parity import curves
from transformer_parity.run import CURVE, LOG, read_log


def add_parser(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "curve",
        help="the curves of several training runs in one picture",
        description="Draw training loss, held-out loss and score of several runs, one backend each, into one picture.",
        epilog="example: parity curve runs/dates-torch runs/dates-jax runs/dates-tf --out dates.png",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that `parity train` wrote")
    parser.add_argument("--out", type=Path, default=Path(CURVE), metavar="FILE", help=f"png or svg (default: {CURVE})")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Draw, and return the exit code."""
    try:
        if missing := [str(folder) for folder in options.runs if not (folder / LOG).is_file()]:
            raise FileNotFoundError(f"no {LOG} in {', '.join(missing)}")
        if options.out.suffix not in (".png", ".svg"):
            raise ValueError(f"--out must end in .png or .svg: got {options.out}")
        logs = [read_log(folder) for folder in options.runs]
        who = [name for log in logs for name in curves.losses(log)[1]]
        if len(logs) > 1 and len(set(who)) < len(who):
            raise ValueError(f"one run a backend: got {', '.join(who)}")
        events = [event for log in logs for event in log]
        tasks = {event["task"] for event in events if event["event"] == "start"}
        if len(tasks) > 1:
            raise ValueError(f"these runs learn different things: {', '.join(sorted(tasks))}")
        curves.draw(events, options.out)
    except (OSError, ValueError) as error:
        print(f"parity curve: error: {error}", file=sys.stderr)
        return 3
    print(options.out)
    return 0
