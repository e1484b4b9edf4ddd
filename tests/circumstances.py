"""A process that imports every command once, then runs each requested command in a fork of itself.

A fork starts in a millisecond, and its effects are isolated from other runs. The process reads requests as lines
of JSON from standard input and writes the answers to standard output, also as JSON. If it is started with a command as
its arguments, it runs only that command.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path

from transformer_parity.cli.main import COMMANDS, main

STRANGER = 12345  # a user ID without a name, a home directory, or files
SMALL = {  # reduces the work of a command without changing how the command ends
    "transformer_parity.transformer.cases.for_ports:SEEDS": lambda real: 1,
    "transformer_parity.transformer.cases.for_ports:ENDING_SEEDS": lambda real: 1,
    "transformer_parity.cli.golden:golden_cases": lambda real: lambda config: real(config)[:1],
    "transformer_parity.engine.style:DPI": lambda real: 20,
    "transformer_parity.apps.train.corpora:DATES_TRAINED": lambda real: 64,
    "transformer_parity.apps.train.corpora:DATES_HELD_OUT": lambda real: 4,
}


def prepare(command: str | None = None) -> None:
    """Import the module of one command or of all commands, and reduce the amount of work that they do."""
    for module in {module for name, (module, _, _) in COMMANDS.items() if command in (None, name)}:
        import_module(module if "." in module else f"transformer_parity.cli.{module}")
    if command in (None, "show"):
        import_module("matplotlib.figure")  # the unprivileged user may not be able to read Python's own library
    for place, change in SMALL.items():
        name, _, attribute = place.partition(":")
        if command is None or name in sys.modules:
            module = import_module(name)
            setattr(module, attribute, change(getattr(module, attribute)))


class Moment:
    """An audit hook that counts events (imports, opened files, processes) and sends a signal at one of them."""

    def __init__(self, number: int = 0, at: int = 0) -> None:
        self.number, self.at, self.passed = number, at, 0

    def __call__(self, event: str, arguments: object) -> None:
        self.passed += 1
        if self.passed == self.at:
            os.kill(os.getpid(), self.number)


def ended(arguments: list[str]) -> int:
    """Run a command as the interpreter would, and return its exit code."""
    try:
        return main(arguments)
    except SystemExit as leaving:
        return leaving.code or 0
    except BaseException:
        traceback.print_exc()
        return 1


def run(request: dict, stderr: int) -> None:
    """Set up the requested circumstance, run the command, and write the number of events to a file."""
    os.setsid()  # detach from the terminal
    os.chdir(request["directory"])
    os.environ |= {"CIRCUMSTANCE": request["mark"], "TMPDIR": request["temporary"]}
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(request["stdout"], os.O_WRONLY), 1)
    os.dup2(stderr, 2)
    circumstance = request["circumstance"]
    if circumstance == "head":
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(reading)
    if circumstance == "a full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    if circumstance == "another user" and os.getuid() == 0:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
    number = getattr(signal, circumstance, 0)
    moment = Moment(number, request["at"])
    sys.addaudithook(moment)
    code = ended(request["arguments"])
    if circumstance == "plain":
        Path(request["passed"]).write_text(str(moment.passed))
    atexit._run_exitfuncs()
    os._exit(code)


def serve() -> None:
    """Answer each request with an exit code or, if a signal ended the command, the negative signal number."""
    for line in sys.stdin:
        reading, writing = os.pipe()  # a pipe can capture the output even if the disk is full
        if (pid := os.fork()) == 0:
            run(json.loads(line), writing)
        _, status = os.waitpid(pid, 0)
        os.write(writing, b".")
        os.close(writing)
        said = os.read(reading, 100_000).decode()[:-1]
        os.close(reading)
        print(json.dumps([os.waitstatus_to_exitcode(status), said]), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes start with SIGINT ignored
    if len(sys.argv) > 1:
        prepare(sys.argv[1])
        sys.exit(ended(sys.argv[1:]))
    prepare()
    serve()
