"""Options and types of options that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable

from transformer_parity.ports.protocol import SearchOptions
from transformer_parity.ports.registry import PORTS
from transformer_parity.system.errors import UsageError


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


def add_backends(parser: argparse.ArgumentParser, default: list[str] | None, otherwise: str = "") -> None:
    """Add the option that chooses backends; ``otherwise`` describes what no choice means, where there is no default."""
    parser.add_argument(
        "--backend",
        "--backends",
        dest="backends",
        type=one_or_more(PORTS),
        default=default,
        metavar=",".join(PORTS),
        help=f"which packages (default: {otherwise or ','.join(default or ())})",
    )


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose between greedy and beam search."""
    parser.add_argument(
        "--beam",
        type=positive,
        metavar="K",
        help="beam search, keeping K hypotheses; the paper has 4 (default: greedy search, the likeliest next token)",
    )
    parser.add_argument(
        "--length-penalty",
        type=not_negative,
        metavar="ALPHA",
        help="with --beam: how much longer hypotheses are favoured; 0 not at all (default: 0.6, as in the paper)",
    )


def search_options(options: argparse.Namespace, max_length: int | None, num_hypotheses: int = 1) -> SearchOptions:
    """Return the search that was asked for.

    Raises:
        UsageError: The options contradict each other.
    """
    if options.beam is None:
        if options.length_penalty is not None:
            raise UsageError("--length-penalty is about beam search: add --beam 4")
        return SearchOptions(max_length=max_length)
    penalty = SearchOptions.length_penalty if options.length_penalty is None else options.length_penalty
    return SearchOptions(options.beam, penalty, max_length, num_hypotheses)


def positive(text: str) -> int:
    """Return an argparse value: an integer above zero."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer: got {text!r}")
    return value


def not_negative(text: str) -> float:
    """Return an argparse value: a number, zero or above."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0: got {text!r}")
    return value
