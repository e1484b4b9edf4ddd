"""The one exception for input that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """Input that cannot be used. The message says what, got, needed; ``parity`` prints it and exits with 3.

    The message is printed as one line, whatever it quotes; what else is given is printed below it as it is.
    """


def printable(text: str) -> str:
    """Return text from outside as one line without control characters, so that it forges no line and no colour."""
    if text.isprintable():
        return text
    other = {True: " ", False: "\N{REPLACEMENT CHARACTER}"}
    return "".join(one if one.isprintable() else other[one.isspace()] for one in text)


def reason(error: Exception) -> str:
    """Return the message of an error; of one of the operating system, the file and what became of it."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that mean unusable input here into a UsageError with its message.

    Errors of any other type are errors of the program and keep their traceback.

    Args:
        kinds: The types, such as ``OSError, ValueError``.

    Raises:
        UsageError: An error of one of these types was raised. A closed pipe stays a BrokenPipeError.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except kinds as error:
        raise UsageError(reason(error)) from error
