"""Messages between a process and its child processes: pickled objects over two pipes.

A message is the number of its parts, their lengths, and the parts: first what is pickled, then each array as it lies in
memory. Pickled with the rest, the values of a base-sized model would be copied five times.

This module is imported by every child, also by one of another interpreter that has no packages.
"""

from __future__ import annotations

import os
import pickle
import struct
import time
from typing import IO, Any

LENGTH = struct.Struct("!Q")  # in bytes, and the number of parts
START = b"\0transformer-parity\0"  # before the first message; wrappers may print before it
MOST_PRINTED = 2**16  # bytes that a wrapper may print


def parts(message: Any) -> list[Any]:
    """Return what stands for a message, one after another: bytes, and memory of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    content = [pickle.dumps(message, 5, buffer_callback=buffers.append), *(buffer.raw() for buffer in buffers)]
    lengths = (len(content), *map(len, content))
    return [b"".join(map(LENGTH.pack, lengths)), *content]


def receive(stream: IO[bytes]) -> Any:
    """Return the next message.

    Raises:
        EOFError: The stream has ended, possibly within a message.
    """
    return unpickled(receive_parts(stream))


class NoStartError(Exception):
    """Something else than text stands before the first message. The error message is the first line of the text."""


def skip_to_start(stream: IO[bytes]) -> None:
    """Read a stream up to its first message.

    Raises:
        EOFError: If the stream ends before.
        NoStartError: If there is too much text, or something else, before it.
    """
    text = bytearray()
    while (byte := stream.read(1)) not in (b"", START[:1]) and len(text) < MOST_PRINTED:
        text += byte
    if not byte:
        raise EOFError("there is no message")
    if byte + stream.read(len(START) - 1) != START:
        lines = text.decode("utf-8", "replace").strip().splitlines()
        raise NoStartError(lines[0] if lines else "")


def receive_parts(stream: IO[bytes]) -> list[bytearray]:
    """Return what stands for the next message.

    Raises:
        EOFError: The stream has ended, possibly within a message.
    """
    (number,) = LENGTH.unpack(_exactly(LENGTH.size, stream))
    lengths = struct.unpack(f"!{number}Q", _exactly(number * LENGTH.size, stream))
    return [_exactly(length, stream) for length in lengths]


def unpickled(content: list[bytearray]) -> Any:
    """Return the message that some parts stand for."""
    first, *buffers = content
    return pickle.loads(first, buffers=buffers)


def _exactly(size: int, stream: IO[bytes]) -> bytearray:
    content = bytearray(size)  # arrays in it can be written to
    view, found = memoryview(content), 0
    while count := stream.readinto(view[found:]):  # type: ignore[attr-defined]
        found += count
    if found < size:
        raise EOFError(f"a message has ended after {found} of {size} bytes")
    return content


class Broken:
    """The message of a process that cannot continue.

    Args:
        why: The exception, in words.
        is_usage: Whether the input is at fault. Then most processes of a team send the same.

    Attributes:
        at: When it was made, in seconds since the epoch.
    """

    def __init__(self, why: str, is_usage: bool = False) -> None:
        self.why, self.is_usage, self.at = why, is_usage, time.time()


class Parent:
    """The child's side: its standard input and output, which nothing else in the process can use any more.

    From then on, standard input is at its end, and what is written to standard output goes where errors go.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._requests = os.fdopen(os.dup(0), "rb")
        self._replies = os.fdopen(os.dup(1), "wb")
        self._replies.write(START)
        self._replies.flush()
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
        for part in parts(message):
            self._replies.write(part)
        self._replies.flush()

    def _leave_if_forked(self) -> None:
        """End this process if it is a copy, made by ``os.fork``: two of them would send every message twice."""
        if os.getpid() != self._pid:
            os._exit(1)
