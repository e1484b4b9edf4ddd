"""Messages between a process and its child processes: pickled objects over two pipes, each behind its length.

This module is imported by every child, also by one of another interpreter that has no packages.
"""

from __future__ import annotations

import os
import pickle
import struct
from typing import IO, Any

LENGTH = struct.Struct("!Q")  # of the pickled object, in bytes


def encoded(message: Any) -> bytes:
    """Return the bytes that stand for a message."""
    content = pickle.dumps(message)
    return LENGTH.pack(len(content)) + content


def receive(stream: IO[bytes]) -> Any:
    """Return the next message.

    Raises:
        EOFError: The stream has ended, possibly within a message.
    """
    (length,) = LENGTH.unpack(_exactly(LENGTH.size, stream))
    return pickle.loads(_exactly(length, stream))


def _exactly(size: int, stream: IO[bytes]) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError(f"a message has ended after {len(content)} of {size} bytes")
    return content


class Parent:
    """The child's side: its standard input and output, which nothing else in the process can use any more.

    From then on, standard input is at its end, and what is written to standard output goes where errors go.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._requests = os.fdopen(os.dup(0), "rb")
        self._replies = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            EOFError: There will be no more.
        """
        self._leave_if_forked()
        return receive(self._requests)

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: The parent process has ended.
        """
        self._leave_if_forked()
        self._replies.write(encoded(message))
        self._replies.flush()

    def _leave_if_forked(self) -> None:
        """End this process if it is a copy, made by ``os.fork``: two of them would send every message twice."""
        if os.getpid() != self._pid:
            os._exit(1)
