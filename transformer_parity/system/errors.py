"""The one exception for input that cannot be used."""

from __future__ import annotations

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


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that mean unusable input here into a UsageError with the same message.

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
        raise UsageError(str(error)) from error
