"""The commands of ``parity``, one a module: ``add_parser`` describes the options, ``run`` does the work."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from transformer_parity.ports import PORTS


def one_or_more(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: known names with commas between them, in the order in which they are known."""
    names = list(known)

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in chosen if name not in names]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}: choose from {', '.join(names)}")
        if not chosen:
            raise argparse.ArgumentTypeError(f"choose at least one of {', '.join(names)}")
        return [name for name in names if name in chosen]

    return parse


def add_backends(parser: argparse.ArgumentParser, default: list[str]) -> None:
    """Add the option that chooses backends."""
    parser.add_argument(
        "--backend",
        "--backends",
        dest="backends",
        type=one_or_more(PORTS),
        default=default,
        metavar=",".join(PORTS),
        help=f"which packages (default: {','.join(default)})",
    )


def positive(text: str) -> int:
    """Return an argparse value: an integer above zero."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer: got {text!r}")
    return value
