"""The command line stays small: limits on the total number of options and arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from transformer_parity.cli.main import COMMANDS, make_parser

MOST = 170


def innermost(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands that have no subcommands."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for choice in action.choices.values():
            yield from innermost(choice)


def test_number_of_options_and_arguments_stays_within_the_limit():
    """All options and positional arguments are included except --help."""
    counts = {
        parser.prog: sum(not isinstance(action, argparse._HelpAction) for action in parser._actions)
        for name in COMMANDS
        for parser in innermost(make_parser(name))
    }
    assert len(counts) >= len(COMMANDS)
    assert sum(counts.values()) <= MOST, counts
