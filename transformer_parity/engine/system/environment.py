"""The environment of a process: variables that frameworks read when they are imported, and standard streams."""

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

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # constants from malloc.h


def prepare_environment() -> None:
    """Set variables so that frameworks allocate GPU memory on demand and print no startup messages."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory for later allocations, unless environment variables configure malloc.

    By default, glibc returns the memory of each large array to Linux, which then maps the next array page by page. This
    takes 25% of the time per training step at base size, and 50% at smaller sizes (docs/how-to/train.md). The function
    has no effect with other C libraries.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(OSError, AttributeError):  # there is no glibc, or it doesn't support mallopt
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # disables trimming


@contextmanager
def quiet_frameworks() -> Iterator[TextIO]:
    """Suppress the text that compiled code prints to standard error, and yield a stream that isn't suppressed.

    TensorFlow prints the CPU's instruction sets regardless of its settings. If an exception is raised, the suppressed
    text is printed, because it may contain the reason. After a KeyboardInterrupt or a UsageError, the suppressed text
    isn't printed, because the reason is known.
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
    """A text stream that ignores write errors, so that a command can still run to completion.

    After the first error, all further text is discarded. Characters that the encoding doesn't support, and bytes in
    paths that aren't valid UTF-8, are written as escape sequences.

    Args:
        stream: The underlying binary stream.
        encoding: The text encoding.

    Attributes:
        error: The first write error; None if no error has occurred, or if the reader closed the pipe, as `head` does.
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
        """Flush the buffered text to the operating system."""
        try:
            super().flush()
        except OSError as error:
            self._drop(error)
            super().flush()

    def _drop(self, error: OSError) -> None:
        """Discard the buffered text and all further text."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.fileno())
        os.close(nothing)
        if not isinstance(error, BrokenPipeError):
            self.error = error


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Replace standard output and standard error, even if they are closed, with streams that ignore write errors.

    A stream that other code has replaced is left unchanged.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # the descriptor is closed, so the next opened file would get its number
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
