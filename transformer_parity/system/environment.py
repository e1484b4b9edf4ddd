"""The process environment that the frameworks read when they are imported."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from transformer_parity.system.errors import UsageError


def prepare_environment() -> None:
    """Let frameworks share a GPU instead of claiming it, and keep their start-up notices off the terminal."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@contextmanager
def quiet_frameworks() -> Iterator[TextIO]:
    """Keep what compiled code prints to standard error off the terminal, and yield the terminal.

    TensorFlow prints its instruction sets under every setting. What was held back is printed when something fails,
    because the reason may be in it; not after Ctrl-C, and not for a UsageError, which has its reason.
    """
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "w") as terminal, tempfile.TemporaryFile("w+", errors="replace") as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield terminal
        except (KeyboardInterrupt, UsageError):
            raise
        except BaseException:
            held_back.seek(0)
            terminal.write(held_back.read())
            raise
        finally:
            sys.stderr.flush()
            terminal.flush()
            os.dup2(terminal.fileno(), 2)
