"""Messages between a process and its child processes: pickled objects, sent over two pipes.

A message consists of the number of its parts, their lengths, and the parts. The first part is the pickled object, and
each further part is the memory of an array. If the arrays were pickled with the object, the values of a base-sized
model would be copied five times.

This module must import only the standard library. Every child process imports this module, and a child process may run
in a different interpreter that has no packages.
"""

from __future__ import annotations

import os
import pickle
import struct
import time
from typing import IO, Any

LENGTH = struct.Struct("!Q")  # encodes a number: the number of parts of a message, or the length of a part in bytes
START = b"\0transformer-parity\0"  # marks the start of the first message, because wrappers may print text before it
MOST_PRINTED = 2**16  # maximum number of bytes that a wrapper may print


def parts(message: Any) -> list[Any]:
    """Return the parts of a message: a header with their lengths, the pickled message, and its arrays' buffers."""
    buffers: list[pickle.PickleBuffer] = []
    content = [pickle.dumps(message, 5, buffer_callback=buffers.append), *(buffer.raw() for buffer in buffers)]
    lengths = (len(content), *map(len, content))
    return [b"".join(map(LENGTH.pack, lengths)), *content]


def receive(stream: IO[bytes]) -> Any:
    """Return the next message.

    Raises:
        EOFError: If the stream has ended, possibly within a message.
    """
    return unpickled(receive_parts(stream))


class NoStartError(Exception):
    """The stream starts with binary data, or with more than ``MOST_PRINTED`` bytes of text.

    The error message is the first line of the text.
    """


def skip_to_start(stream: IO[bytes]) -> None:
    """Skip everything before the first message of a stream.

    Raises:
        EOFError: If the stream ends before the first message.
        NoStartError: If binary data, or more than ``MOST_PRINTED`` bytes of text, precede the first message.
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
    """Return the parts of the next message.

    Raises:
        EOFError: If the stream has ended, possibly within a message.
    """
    (number,) = LENGTH.unpack(_exactly(LENGTH.size, stream))
    lengths = struct.unpack(f"!{number}Q", _exactly(number * LENGTH.size, stream))
    return [_exactly(length, stream) for length in lengths]


def unpickled(content: list[bytearray]) -> Any:
    """Return the message that consists of these parts."""
    first, *buffers = content
    return pickle.loads(first, buffers=buffers)


def _exactly(size: int, stream: IO[bytes]) -> bytearray:
    content = bytearray(size)  # mutable, so that the arrays in the message are writable
    view, found = memoryview(content), 0
    while count := stream.readinto(view[found:]):  # type: ignore[attr-defined]
        found += count
    if found < size:
        raise EOFError(f"the stream ended after {found} of {size} bytes of a message")
    return content


class Broken:
    """The last message of a process that can't continue.

    Args:
        why: A description of the exception that was raised.
        is_usage: Whether unusable input caused the exception. In this case, most processes of a team send the same
            message.

    Attributes:
        at: The time of the error, in seconds since the epoch.
    """

    def __init__(self, why: str, is_usage: bool = False) -> None:
        self.why, self.is_usage, self.at = why, is_usage, time.time()


class Parent:
    """The connection of a child process to its parent, over the child's standard input and output.

    Creating this object reserves both streams. Other code in the process then reads an empty standard input, and its
    standard output is redirected to standard error.
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
        """Return the next message from the parent process.

        Raises:
            EOFError: If there are no more messages.
        """
        self._leave_if_forked()
        return receive(self._requests)

    def send(self, message: Any) -> None:
        """Send a message to the parent process.

        Raises:
            OSError: If the parent process has exited.
        """
        self._leave_if_forked()
        for part in parts(message):
            self._replies.write(part)
        self._replies.flush()

    def _leave_if_forked(self) -> None:
        """Exit if ``os.fork`` created this process. Otherwise, every message would be sent twice."""
        if os.getpid() != self._pid:
            os._exit(1)
