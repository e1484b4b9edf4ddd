"""The entry point of ``parity``: the exit code of the process is the command's, whatever happens to it."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

INCOMPLETE = 3  # as in main.py, which is not imported yet


def main(arguments: list[str] | None = None) -> int:
    """Import the command line and run a command. An error or a signal outside of the command ends the process with 3.

    Without arguments, which then are those of the process, a C library cannot choose the exit code either.
    """
    code = INCOMPLETE
    if arguments is None and os.name == "posix":
        _end_by(lambda: code)
    try:
        from transformer_parity.engine.system.interrupts import ctrl_c_waits, sigterm_is_ctrl_c

        with sigterm_is_ctrl_c():
            with ctrl_c_waits():  # an interrupted import may end the process otherwise than we do
                from transformer_parity.cli.main import main as run
            code = run(arguments)
    except KeyboardInterrupt:
        pass
    except SystemExit as error:  # of argparse
        code = error.code if isinstance(error.code, int) else INCOMPLETE
    except Exception:  # whose exit code of 1 would read as a divergence
        traceback.print_exc()
    return code


def _end_by(code: Callable[[], int]) -> None:
    """End the process with this exit code, or with 3 if a C library calls ``exit``.

    OpenBLAS, for example, calls ``exit(1)`` when it has no memory. Python calls ``exit`` too, but after the functions
    that are registered with ``atexit``. The one that is registered first runs last, and ends the process before.
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
    os.write(2, b"parity: error: a library ended the process\n")
    os._exit(INCOMPLETE)
