"""The command ``parity``: the commands, the one that is run, and what it ends with."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
import traceback
from collections.abc import Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import NoReturn

from transformer_parity import __version__
from transformer_parity.engine.system.environment import lasting_streams
from transformer_parity.engine.system.errors import UsageError, printable, reason
from transformer_parity.engine.system.files import delete_result, is_same_file
from transformer_parity.engine.system.interrupts import ctrl_c_waits, sigterm_is_ctrl_c
from transformer_parity.engine.system.machine import needs

WIDTH = 80  # characters of a description
INCOMPLETE = 3  # the exit code of everything that compared nothing, wrong usage included

# Command: its module (in this directory unless it has a dot), the function that describes its options, and its line
# of help.
COMMANDS = {
    "check": ("check", "add_parser", "compare every port with the reference, tap by tap"),
    "check-distributed": (
        "check_distributed",
        "add_parser",
        "compare training on several devices with training on one",
    ),
    "init-port": ("init_port", "add_parser", "write a port that runs and agrees, to put your own model into"),
    "golden": ("golden", "add_parser", "write inputs, weights and everything computed from them to files"),
    "compare": ("golden", "add_parser_compare", "compare two such folders; one may come from a port in any language"),
    "selftest": ("selftest", "add_parser", "plant every known mistake in every port: is it caught, located and named?"),
    "train": ("train", "add_parser", "train a model in any backend, go on in another, or several in lockstep"),
    "checkpoint": ("checkpoint", "add_parser", "join the folder of a run on several devices to one file, or split one"),
    "evaluate": ("evaluate", "add_parser", "measure the loss and the score of trained weights on held-out sentences"),
    "translate": ("translate", "add_parser", "translate lines of text in any backend, or compare the translations"),
    "import": ("import_checkpoint", "add_parser", "read a checkpoint of other software, and prove what was read"),
    "export": ("import_checkpoint", "add_parser_export", "write a model as other software reads it"),
    "explore": ("explore", "add_parser", "write a page that shows one sentence pair in every port, tap by tap"),
    "bench": (
        "transformer_bench.command",
        "add_parser",
        "time the packages on the same work, once their results agree",
    ),
    "info": ("info", "add_parser", "describe this machine, the backends and the presets; or a weight file"),
    "source": ("source", "add_parser", "print the same piece of code from the four packages, with what differs marked"),
    "show": ("show", "add_parser", "draw positions, masks and attention weights"),
}
# Options that name a file of results, by command. The file of an earlier run is deleted before anything can fail.
RESULTS = {
    "check": ("--json", "--html"),
    "check-distributed": ("--json", "--html"),
    "compare": ("--json",),
    "selftest": ("--json",),
    "evaluate": ("--json",),
    "import": ("--json",),
    "export": ("--json",),
    "explore": ("--json", "--out"),
    "bench": ("--json", "--plot"),
}
DESCRIPTION = """\
One Transformer, written four times: in NumPy, which is the definition, and in
PyTorch, JAX and TensorFlow. `parity` compares them, or a port of your own, with
the definition at every intermediate value (a "tap"), and finds where a port goes wrong.

start here:
  parity translate --text "Freitag, 3. Mai 2024"   the model that ships reads a date
  parity explore "Freitag, 3. Mai 2024"            every value that leads to its answer, as a page for a browser
  parity source MultiHeadAttention                 the same class in the four packages, with what differs marked
  parity check                                     do the packages agree? Needs their frameworks
  parity init-port --framework torch               compare a model of your own

The first three need NumPy alone; `parity info` shows which frameworks are installed, and how to install the others.
"""
EPILOG = """`parity COMMAND --help` describes a command, with examples and exit codes.
Exit code 3 always means that nothing, or not everything, was done; wrong usage included. A training run that
was stopped and saved exits with 130 or 143.
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors exit with 3, because 2 is the code of a precision divergence."""

    def __init__(self, **options: object) -> None:
        description = str(options.get("description") or "")
        if "\n" not in description:  # what has lines of its own keeps them
            options["description"] = textwrap.fill(description, WIDTH)
        super().__init__(**options)  # type: ignore[arg-type]
        self.set_defaults(command=self.prog, parser=self)  # the innermost parser's remain: "parity bench forward"

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit."""
        if "are required" in message:
            message += f"; `{self.prog} --help` has examples"
        if "unrecognized arguments: -" in message:
            option = message.split()[2].partition("=")[0]
            alike = difflib.get_close_matches(option, self._option_string_actions, 1)
            message += f": did you mean {alike[0]}?" if alike else f"; `{self.prog} --help` lists the options"
        self.print_usage(sys.stderr)
        self.exit(INCOMPLETE, f"{self.prog}: error: {printable(message)}\n")


def make_parser(chosen: str | None) -> Parser:
    """Return the parser of one command, whose module alone is imported; without one, a parser that lists them all."""
    parser = Parser(
        prog="parity", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    if chosen in COMMANDS:
        module, describe, _ = COMMANDS[chosen]
        with ctrl_c_waits():  # an interrupted import may end the process otherwise than we do
            imported = import_module(module if "." in module else f"transformer_parity.cli.{module}")
        getattr(imported, describe)(commands)
    else:
        for name, (_, _, line) in COMMANDS.items():
            commands.add_parser(name, help=line)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code, which does not depend on the reader of its output."""
    try:
        with sigterm_is_ctrl_c(), lasting_streams():
            try:
                return _run(sys.argv[1:] if arguments is None else arguments)
            finally:
                sys.stdout.flush()
                if error := getattr(sys.stdout, "error", None):
                    print(f"parity: error: standard output cannot be written: {error.strerror}", file=sys.stderr)
                    sys.exit(INCOMPLETE)
    except KeyboardInterrupt:  # before there was a command, or behind it
        return INCOMPLETE


def _delete_results(given: Sequence[str]) -> None:
    """Delete the results of an earlier run, so that nobody takes them for the results of this one, however it ends.

    Raises:
        UsageError: If two arguments name the same file, or if it can't be deleted.
    """
    options = RESULTS.get(given[0], ()) if given else ()
    if not options or "--help" in given or "-h" in given:
        return
    results, others, arguments = [], [], iter(given)
    for argument in arguments:
        option, equals, value = argument.partition("=")
        # argparse accepts abbreviations. Shorter ones are ambiguous, because --html begins like --help.
        if len(option) >= 4 and any(known.startswith(option) for known in options):
            results.append((option, value if equals else next(arguments, "")))
        else:
            others.append(value if equals else argument)
    results = [(option, path) for option, path in results if path[:1] not in ("", "-")]
    for option, path in results:
        if any(is_same_file(path, other) for other in others):
            raise UsageError(f"{option} {path}: another argument names the same file")
    twice = [one for one, (_, other) in combinations(results, 2) if is_same_file(one[1], other)]
    for _, path in results:
        delete_result(Path(path))
    for option, path in twice:
        raise UsageError(f"{option} {path}: another option names the same file")


def _run(given: Sequence[str]) -> int:
    """Choose the command, run it, and turn what it raises into a message and an exit code."""
    command = "parity"
    try:
        _delete_results(given)
        if unmet := needs():
            raise UsageError(f"the command line {unmet}")
        parser = make_parser(given[0] if given else None)
        if given and not given[0].startswith("-") and given[0] not in COMMANDS:
            alike = difflib.get_close_matches(given[0], COMMANDS, 1)
            meant = f"did you mean {alike[0]}?" if alike else "`parity` lists the commands"
            parser.error(f"there is no command {given[0]!r}: {meant}")
        options, unknown = parser.parse_known_args(given)
        command = options.command
        if unknown:
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if options.version:
            print(f"parity {__version__}")
            return 0
        if "run" not in options:
            parser.print_help()
            return 0
        try:
            return options.run(options)
        except SystemExit as error:  # which a port or a library raised
            raise UsageError(f"the command was ended by sys.exit({error.code!r})") from error
    except UsageError as error:
        message, *below = error.args
        print(f"{command}: error: {printable(message)}", *below, sep="\n", file=sys.stderr)
    except PermissionError as error:  # which may come of the mere question whether a file is there
        print(f"{command}: error: {printable(reason(error))}", file=sys.stderr)
    except BrokenPipeError:  # the reader of translations, such as `head`, has left: the rest is not made
        pass
    except KeyboardInterrupt:
        print("parity: interrupted", file=sys.stderr)
    except MemoryError as error:
        print(f"{command}: error: out of memory: {error}", file=sys.stderr)
    except Exception:  # whose exit code of 1 would read as a semantic divergence
        traceback.print_exc()
    return INCOMPLETE


if __name__ == "__main__":
    sys.exit(main())
