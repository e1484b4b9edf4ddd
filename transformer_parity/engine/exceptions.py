"""Describe an exception that an implementation raised, so that the author of the implementation can find the cause."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

SHOWN = 3  # number of stack frames shown, the innermost last


def described(error: Exception, hidden: Sequence[Path]) -> str:
    """Return the message of an exception, followed by the lines in the author's code that led to the exception.

    Args:
        error: The exception.
        hidden: The directories that contain the checker's code. Lines in these directories are omitted.
    """
    message = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, SyntaxError):  # its message already contains the file and the line number
        return message
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    foreign = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, hidden))]
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    own = [frame for frame in foreign if not any(map(Path(frame.filename).is_relative_to, libraries))] or foreign
    lines = [
        f"{Path(frame.filename).name}, line {frame.lineno}" + (f", in {frame.name}" if frame.name != "<module>" else "")
        for frame in own[-SHOWN:]
    ]
    return f"{message} ({'; '.join(lines)})" if lines else message
