"""The exception for unusable input, and functions that convert other exceptions to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """The input can't be used. ``parity`` prints the message and exits with code 3.

    The first argument is the message, which states the requirement and the given value. The message is printed as one
    line, even if it quotes text with line breaks. Further arguments are printed below the message, one per line.
    """


def printable(text: str) -> str:
    """Return untrusted text as one line without control characters, so that it can't imitate lines of a report."""
    if text.isprintable():
        return text
    other = {True: " ", False: "\N{REPLACEMENT CHARACTER}"}
    return "".join(one if one.isprintable() else other[one.isspace()] for one in text)


def reason(error: Exception) -> str:
    """Return the message of an exception. For an OSError about a file, return the path and the reason."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Convert exceptions of the given types to a UsageError, because they indicate unusable input in this block.

    Exceptions of other types indicate a bug in the program, and keep their traceback.

    Args:
        kinds: The types of exceptions, such as ``OSError, ValueError``.

    Raises:
        UsageError: If the block raises an exception of one of these types. A BrokenPipeError is never converted.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except kinds as error:
        raise UsageError(reason(error)) from error
