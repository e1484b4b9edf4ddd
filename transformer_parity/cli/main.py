"""The ``parity`` command: select a command, run it, and return its exit code."""

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

WIDTH = 80  # maximum line length of a description, in characters
INCOMPLETE = 3  # exit code if the command was used incorrectly, failed, or didn't compare everything

# For each command: the module (in this directory unless the name contains a dot), the function that adds its options,
# and a one-line help text.
COMMANDS = {
    "check": ("check", "add_parser", "compare ports with the reference at every intermediate value"),
    "check-distributed": (
        "check_distributed",
        "add_parser",
        "compare training on multiple devices with training on one",
    ),
    "pair": ("pair", "add_parser", "compare any two implementations of any model"),
    "init-pair": ("init_pair", "add_parser", "write a template for `pair`: two implementations that already agree"),
    "init-port": ("init_port", "add_parser", "write a port template that already agrees with the reference"),
    "golden": ("golden", "add_parser", "write golden vectors: the inputs, weights, and results of a model, as files"),
    "compare": (
        "golden",
        "add_parser_compare",
        "compare two directories of golden vectors, which can be written in any programming language",
    ),
    "selftest": ("selftest", "add_parser", "inject known bugs into the ports and check that each is detected"),
    "train": ("train", "add_parser", "train a model, or resume a run in a different backend"),
    "checkpoint": ("checkpoint", "add_parser", "convert between sharded checkpoints and single-file checkpoints"),
    "evaluate": ("evaluate", "add_parser", "measure the loss and the score of trained weights on held-out sentences"),
    "translate": ("translate", "add_parser", "translate text, or compare the translations of multiple backends"),
    "import": ("import_checkpoint", "add_parser", "convert a checkpoint from other software, and verify the result"),
    "export": ("import_checkpoint", "add_parser_export", "convert a weight file for use in other software"),
    "explore": ("explore", "add_parser", "write an HTML page with every intermediate value of one sentence pair"),
    "bench": (
        "transformer_bench.command",
        "add_parser",
        "time the backends on the same work, after verifying their results",
    ),
    "info": ("info", "add_parser", "describe this machine, the backends, and the presets, or describe a weight file"),
    "source": ("source", "add_parser", "print the same code from all four packages, with the differences highlighted"),
    "show": ("show", "add_parser", "draw positional encodings, masks, and attention weights"),
}
# The options of each command that specify a result file. An existing file is deleted before the command starts, so that
# the file can't be mistaken for the result of a run that failed.
RESULTS = {
    "check": ("--json", "--html"),
    "check-distributed": ("--json", "--html"),
    "compare": ("--json",),
    "pair": ("--json", "--html"),
    "selftest": ("--json",),
    "evaluate": ("--json",),
    "import": ("--json",),
    "export": ("--json",),
    "explore": ("--json", "--out"),
    "bench": ("--json", "--plot"),
}
DESCRIPTION = """\
Check that a Transformer implements the model defined in "Attention Is All You Need".

The NumPy implementation is the reference. `parity` runs a port of it (the PyTorch,
JAX, or TensorFlow package, or your own model) on the same weights and inputs, and
compares every named intermediate value (a "tap"), gradient, optimizer step, and
decoded token. If any of them differ, `parity` shows the first wrong block.

start here:
  parity translate --text "Freitag, 3. Mai 2024"   translate a date with the included model
  parity explore "Freitag, 3. Mai 2024"            write an HTML page with every intermediate value of that translation
  parity source MultiHeadAttention                 compare the same class in all four packages
  parity check                                     check that the packages agree (requires their frameworks)
  parity init-port --framework torch               start a port of your own model

The first three commands require only NumPy. `parity info` lists the frameworks and shows how to install them.
"""
EPILOG = """Run `parity COMMAND --help` for the options, examples, and exit codes of a command.
Exit code 3 always means that a command did nothing or did not finish, for example because of a usage error.
A training run that was stopped and saved exits with 130 or 143.
"""


class Parser(argparse.ArgumentParser):
    """A parser that exits with 3 on usage errors, because exit code 2 means that a port only lost precision."""

    def __init__(self, **options: object) -> None:
        description = str(options.get("description") or "")
        if "\n" not in description:  # keep the line breaks of a multi-line description
            options["description"] = textwrap.fill(description, WIDTH)
        super().__init__(**options)  # type: ignore[arg-type]
        # The defaults of the innermost subparser take precedence. For example, ``command`` is "parity bench forward".
        self.set_defaults(command=self.prog, parser=self)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit."""
        if "are required" in message:
            message += f"; `{self.prog} --help` has examples"
        if "unrecognized arguments: -" in message:
            option = message.split()[2].partition("=")[0]
            alike = difflib.get_close_matches(option, self._option_string_actions, 1)
            message += f"; did you mean {alike[0]}?" if alike else f"; `{self.prog} --help` lists the options"
        self.print_usage(sys.stderr)
        self.exit(INCOMPLETE, f"{self.prog}: error: {printable(message)}\n")


def make_parser(chosen: str | None) -> Parser:
    """Return the parser of the command ``chosen``. If there is no such command, the parser lists all commands.

    Only the module of this command is imported.
    """
    parser = Parser(
        prog="parity", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    if chosen in COMMANDS:
        module, describe, _ = COMMANDS[chosen]
        # If Ctrl-C interrupts an import, the imported library may end the process with a different exit code.
        with ctrl_c_waits():
            imported = import_module(module if "." in module else f"transformer_parity.cli.{module}")
        getattr(imported, describe)(commands)
    else:
        for name, (_, _, line) in COMMANDS.items():
            commands.add_parser(name, help=line)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code, even if the reader of its output closes the pipe early."""
    try:
        with sigterm_is_ctrl_c(), lasting_streams():
            try:
                return _run(sys.argv[1:] if arguments is None else arguments)
            finally:
                sys.stdout.flush()
                if error := getattr(sys.stdout, "error", None):
                    print(f"parity: error: cannot write to standard output: {error.strerror}", file=sys.stderr)
                    sys.exit(INCOMPLETE)
    except KeyboardInterrupt:  # the user pressed Ctrl-C before or after the command ran
        return INCOMPLETE


def _delete_results(given: Sequence[str]) -> None:
    """Delete the result files of an earlier run, so that they can't be mistaken for the results of this run.

    Raises:
        UsageError: If two arguments refer to the same file, or if a file can't be deleted.
    """
    options = RESULTS.get(given[0], ()) if given else ()
    if not options or "--help" in given or "-h" in given:
        return
    results, others, arguments = [], [], iter(given)
    for argument in arguments:
        option, equals, value = argument.partition("=")
        # argparse accepts abbreviations of at least four characters. Shorter abbreviations are ambiguous. For example,
        # --h matches both --html and --help.
        if len(option) >= 4 and any(known.startswith(option) for known in options):
            results.append((option, value if equals else next(arguments, "")))
        else:
            others.append(value if equals else argument)
    results = [(option, path) for option, path in results if path[:1] not in ("", "-")]
    for option, path in results:
        if any(is_same_file(path, other) for other in others):
            raise UsageError(f"{option} {path}: another argument refers to the same file")
    twice = [one for one, (_, other) in combinations(results, 2) if is_same_file(one[1], other)]
    for _, path in results:
        delete_result(Path(path))
    for option, path in twice:
        raise UsageError(f"{option} {path}: another option refers to the same file")


def _run(given: Sequence[str]) -> int:
    """Select the command, run it, and convert its exceptions to a message and an exit code."""
    command = "parity"
    try:
        _delete_results(given)
        if unmet := needs():
            raise UsageError(f"the parity command {unmet}")
        parser = make_parser(given[0] if given else None)
        if given and not given[0].startswith("-") and given[0] not in COMMANDS:
            alike = difflib.get_close_matches(given[0], COMMANDS, 1)
            meant = f"did you mean {alike[0]}?" if alike else "`parity` lists the commands"
            parser.error(f"there is no command {given[0]!r}; {meant}")
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
        except SystemExit as error:  # raised by a port or a library
            raise UsageError(f"a port or a library called sys.exit({error.code!r})") from error
    except UsageError as error:
        message, *below = error.args
        print(f"{command}: error: {printable(message)}", *below, sep="\n", file=sys.stderr)
    except PermissionError as error:  # even Path.exists() may raise this error
        print(f"{command}: error: {printable(reason(error))}", file=sys.stderr)
    except BrokenPipeError:  # the reader of translations, such as `head`, closed the pipe, so skip the rest
        pass
    except KeyboardInterrupt:
        print("parity: interrupted", file=sys.stderr)
    except MemoryError as error:
        print(f"{command}: error: out of memory: {error}", file=sys.stderr)
    except Exception:  # Python would exit with code 1, which means that a port diverges
        traceback.print_exc()
    return INCOMPLETE


if __name__ == "__main__":
    sys.exit(main())
