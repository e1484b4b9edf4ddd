"""The command ``parity``: compare the four packages, look at them, and read them side by side."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from typing import NoReturn

from transformer_parity.cli import bench, check, golden, info, init_port, selftest, show, train, translate
from transformer_parity.system.interrupts import sigterm_is_ctrl_c

INCOMPLETE = 3  # the exit code of everything that compared nothing, wrong usage included


RENAMED = {"--rung": "--stage"}  # option names of the release before


class Parser(argparse.ArgumentParser):
    """A parser whose errors exit with 3, because 2 means something else here."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit."""
        self.print_usage(sys.stderr)
        self.exit(INCOMPLETE, f"{self.prog}: error: {message}\n")


def _renamed(arguments: list[str]) -> list[str]:
    """Return the arguments with the present names of options, and print a note for each old one."""
    found = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in RENAMED:
            print(
                f"parity: {name} is now called {RENAMED[name]}; the old name goes with the next release",
                file=sys.stderr,
            )
        found.append(RENAMED.get(name, name) + equals + value)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = Parser(
        prog="parity",
        description="One Transformer in NumPy, PyTorch, JAX and TensorFlow: does every port agree with the reference?",
        epilog="Start with `parity check`. Every command explains itself with --help.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_parser in (
        check.add_parser,
        init_port.add_parser,
        golden.add_parser,
        golden.add_parser_compare,
        selftest.add_parser,
        train.add_parser,
        train.add_parser_curve,
        train.add_parser_evaluate,
        translate.add_parser,
        bench.add_parser,
        info.add_parser,
        info.add_parser_source,
        show.add_parser,
        show.add_parser_why,
    ):
        add_parser(commands)
    options = parser.parse_args(_renamed(sys.argv[1:] if arguments is None else arguments))
    try:
        with sigterm_is_ctrl_c():
            return options.run(options)
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INCOMPLETE
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INCOMPLETE
    except Exception:  # whose exit code of 1 would read as a semantic divergence
        traceback.print_exc()
        return INCOMPLETE


if __name__ == "__main__":
    sys.exit(main())
