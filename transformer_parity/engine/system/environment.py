"""What a process has around it: the variables that frameworks read when they are imported, and standard streams."""

from __future__ import annotations

import ctypes
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TextIO

from transformer_parity.engine.system.errors import UsageError

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def prepare_environment() -> None:
    """Let frameworks share a GPU instead of claiming it, and keep their start-up notices off the terminal."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for what is allocated next, unless the environment says something about it.

    By default it gives each large array back to Linux, which provides the next one page by page: a quarter of the time
    of a training step at base size, and half at smaller ones (docs/how-to/train.md). Other C libraries do as ever.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(OSError, AttributeError):  # no glibc, or one without
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never


@contextmanager
def quiet_frameworks() -> Iterator[TextIO]:
    """Keep what compiled code prints to standard error off the terminal, and yield the terminal.

    TensorFlow prints its instruction sets under every setting. What was held back is printed when something fails,
    because the reason may be in it; not after Ctrl-C, and not for a UsageError, which has its reason.
    """
    sys.stderr.flush()
    with Stream(os.fdopen(os.dup(2), "wb")) as terminal, tempfile.TemporaryFile("w+", errors="replace") as held_back:
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


class Stream(io.TextIOWrapper):
    """A stream for text. Once it cannot be written, the rest is dropped, so that a command goes on to its end.

    Args:
        stream: Where the bytes go.
        encoding: What it lacks is spelled out, and so are the bytes of a path that are no UTF-8.

    Attributes:
        error: Why it cannot be written, unless its reader has left, as `head` does: that is no error.
    """

    error: OSError | None = None

    def __init__(self, stream: IO[bytes], encoding: str = "utf-8") -> None:
        is_read_at_once = stream.isatty() or stream.fileno() != 1
        super().__init__(stream, encoding, "backslashreplace", line_buffering=is_read_at_once)

    def write(self, text: str) -> int:
        """Write text."""
        try:
            return super().write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Hand what was written to the system."""
        try:
            super().flush()
        except OSError as error:
            self._drop(error)
            super().flush()

    def _drop(self, error: OSError) -> None:
        """Let this text, and what else is written, go nowhere."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.fileno())
        os.close(nothing)
        if not isinstance(error, BrokenPipeError):
            self.error = error


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Let standard output and error take everything, also where they are closed; one that was replaced stays."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file that is opened would take its place
            os.open(os.devnull, os.O_RDWR)
    before = {"stdout": sys.stdout, "stderr": sys.stderr}
    for descriptor, (name, stream) in enumerate(before.items(), 1):
        if stream is getattr(sys, f"__{name}__"):
            if stream is not None:
                stream.flush()
            lasting = os.fdopen(descriptor, "wb", closefd=False)
            setattr(sys, name, Stream(lasting, getattr(stream, "encoding", "utf-8")))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before["stdout"], before["stderr"]
