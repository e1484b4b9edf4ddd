"""The entry point of ``parity``, which guarantees that the process exits with the exit code of the command."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

INCOMPLETE = 3  # must match INCOMPLETE in main.py, which isn't imported yet at this point


def main(arguments: list[str] | None = None) -> int:
    """Import the command line, run a command, and return its exit code.

    If an error or a signal prevents the command from returning an exit code, the exit code is 3. Without ``arguments``,
    the function uses the process's arguments and also prevents C libraries from changing the exit code.
    """
    code = INCOMPLETE
    if arguments is None and os.name == "posix":
        _end_by(lambda: code)
    try:
        from transformer_parity.engine.system.interrupts import ctrl_c_waits, sigterm_is_ctrl_c

        with sigterm_is_ctrl_c():
            # If Ctrl-C interrupts an import, the imported library may end the process with a different exit code.
            with ctrl_c_waits():
                from transformer_parity.cli.main import main as run
            code = run(arguments)
    except KeyboardInterrupt:
        pass
    except SystemExit as error:  # raised by argparse
        code = error.code if isinstance(error.code, int) else INCOMPLETE
    except Exception:  # Python would exit with code 1, which means that a port diverges
        traceback.print_exc()
    return code


def _end_by(code: Callable[[], int]) -> None:
    """Make the process exit with the result of ``code``, or with 3 if a C library calls ``exit``.

    For example, OpenBLAS calls ``exit(1)`` if it runs out of memory. During this call, a handler registered in C ends
    the process with exit code 3. Python itself also calls ``exit``, after it has run the ``atexit`` functions in
    reverse order of registration. This function registers the first ``atexit`` function, which therefore runs last and
    ends the process before Python calls ``exit``.
    """

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code())

    atexit.register(end)
    ctypes.CDLL(None).__cxa_atexit(_end_incomplete, None, None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _end_incomplete(_: object) -> None:
    os.write(2, b"parity: error: a library terminated the process\n")
    os._exit(INCOMPLETE)
