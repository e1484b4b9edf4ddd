"""Run the attacks on the verdict of ``parity pair``, ``assert_parity``, and ``parity compare`` as a user would."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from attacks.attack import PAIRS, Attack
from attacks.pairs import base

TESTS = Path(__file__).parents[2]  # the directory from which commands import this package
BASE = Path(base.__file__)
RESULT = "result.json"  # result of an earlier run, which agreed
CRASHED = 70  # not a verdict: the command printed a traceback
ASSERTION = """
import sys
from transformer_parity.pair import assert_parity
from attacks.pairs import base, methods, originals, outputs
try:
    assert_parity({})
except AssertionError as error:
    print(error)
    sys.exit(3 if "INCOMPLETE" in str(error) else 1)
except (TypeError, ValueError) as error:
    print(error)
    sys.exit(3)
"""


def attack(name: str, what: str, expected: str, run: Callable[[], tuple[int, str]], says: str = "") -> Attack:
    """Return an attack of this family."""
    return Attack(name, " ".join(what.split()), expected, PAIRS, run, says, separate=True)


def classes(module: ModuleType, are_originals: bool = False) -> Iterator[Attack]:
    """Yield an attack for each class of a module that has an expected verdict.

    Args:
        module: The module.
        are_originals: Whether the classes are originals, in contrast to ports.
    """
    for name, kind in vars(module).items():
        if "expected" in getattr(kind, "__dict__", {}):
            own, other = (
                f"{module.__file__}:{name}",
                kind.other if ":" in kind.other else f"{module.__file__}:{kind.other}",
            )
            sides = (own, other) if are_originals else (other, own)
            run = partial(parity, "pair", *sides, *shlex.split(kind.options))
            yield attack(name, str(kind.__doc__), kind.expected, run, kind.says)


def parity(*arguments: str, directory: str = "") -> tuple[int, str]:
    """Run a command of ``parity``, and return its exit code and its output."""
    return _outcome(["-m", "transformer_parity", *map(str, arguments)], directory)


def assertion(arguments: str) -> tuple[int, str]:
    """Call ``assert_parity`` with the given arguments in a new process."""
    return _outcome(["-c", ASSERTION.format(arguments)], "")


def environment() -> dict[str, str]:
    """Return the environment of a command, in which Python finds the attacks."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def _outcome(arguments: list[str], directory: str) -> tuple[int, str]:
    """Run Python, and return its exit code and its output.

    Return 0 if the command fails but prints AGREE, or leaves AGREE in the result of an earlier run.
    """
    with tempfile.TemporaryDirectory() as empty:
        result = Path(directory or empty, RESULT)
        result.write_text('"AGREE"')
        found = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            cwd=result.parent,
            env=environment(),
            timeout=120,
        )
        stale = found.returncode and RESULT in arguments and result.exists() and '"AGREE"' in result.read_text()
    text = f"{found.stderr}\n{found.stdout}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if found.returncode and (stale or any(line.startswith("AGREE") for line in text.splitlines())):
        return 0, f"the exit code is {found.returncode}, but the result is AGREE"
    return CRASHED if "Traceback (most" in text else found.returncode, " / ".join(lines)


def settings(table: str) -> Iterator[Attack]:
    """Yield the attacks in a text.

    Each attack has two lines: its name and description, then its expected verdict and the options of the command or,
    after ``assert``, the arguments of ``assert_parity``. They may be followed by ``=>`` and text that the output must
    contain.
    """
    lines = [line.strip() for line in table.splitlines() if line.strip() and not line.startswith("#")]
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        name, what = first.split(": ", 1)
        expected, options = second.split(": ", 1)
        options, _, says = options.partition(" => ")
        run: Any = partial(assertion, options.removeprefix("assert "))
        if not options.startswith("assert "):
            run = partial(parity, *shlex.split(options.replace("BASE", str(BASE))))
        yield attack(name, what, expected, run, says)
