"""An exception raised inside an implementation, described for its author."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

SHOWN = 3  # lines of foreign code, the innermost last


def described(error: Exception, hidden: Sequence[Path]) -> str:
    """Return an error, and the lines of code that led to it.

    Args:
        error: The exception.
        hidden: Directories of code that its author did not write.
    """
    message = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, SyntaxError):  # which says it itself
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
