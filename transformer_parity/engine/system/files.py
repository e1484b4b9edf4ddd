"""Files that are written whole or not at all; and what is no file, such as standard output, which is written into."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformer_parity.engine.system.errors import UsageError, refusals


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a temporary file, which takes the place of a file unless something is raised.

    A link stays, and what it names is replaced. What is no regular file (a pipe, a device, standard output) is written
    into instead.

    Raises:
        OSError: The file cannot be written; the error names it.
    """
    try:
        if _is_replaced(path):
            with _beside(Path(os.path.realpath(path))) as temporary:
                yield temporary
        else:
            with tempfile.TemporaryDirectory(prefix="parity-") as folder:
                yield (temporary := Path(folder, "content"))
                _write_into(path, temporary)
    except OSError as error:  # which names the temporary file, or none
        if error.strerror:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a temporary file in the same directory, which then replaces a regular file, even if the power fails."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # unique for each writer
    try:
        yield temporary
        _sync(temporary, os.O_RDWR)  # Windows can only sync files that are open for writing
        os.replace(temporary, path)
        if os.name == "posix":  # other systems can't open a directory
            _sync(path.parent, os.O_RDONLY)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path, mode: int) -> None:
    file = os.open(path, mode)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _is_replaced(path: Path) -> bool:
    """Whether a path is that of a regular file, which may not be there yet, and not of one of this process' streams."""
    return not path.exists() or (path.is_file() and _stream_at(path) is None)


def _stream_at(path: Path) -> int | None:
    """Return which of this process' streams a path names: 1, 2 or none."""
    return next((number for number in (1, 2) if os.path.samestat(path.stat(), os.fstat(number))), None)


def _write_into(path: Path, content: Path) -> None:
    """Write into what is no regular file; its reader may leave at any time."""
    number = _stream_at(path)
    place = path if number is None else os.dup(number)  # a pipe whose reader has left cannot be opened
    with suppress(BrokenPipeError), content.open("rb") as source, open(place, "ab") as stream:
        shutil.copyfileobj(source, stream)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all; what UTF-8 cannot hold is spelled out.

    Raises:
        OSError: The file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8", "backslashreplace")


def write_json(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Write plain values as JSON, whole or not at all.

    Raises:
        OSError: The file cannot be written.
        ValueError: A number is not finite.
    """
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def check_writable(*paths: Path | None) -> None:
    """Refuse, before any work, a file that could not be written afterwards; None is no file.

    Raises:
        UsageError: The path is a folder, or what lies there, or its folder, cannot be written.
    """
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent}")
        if path.is_dir():
            raise UsageError(f"{path} is a folder")
        try:
            if _is_replaced(path):
                tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
            elif not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def is_same_file(path: str, other: str) -> bool:
    """Whether two paths, of which the second may be any text, name the same file; devices and pipes never are."""
    try:
        if not os.path.exists(path):
            return os.path.realpath(path) == os.path.realpath(other)
        return _is_replaced(Path(path)) and os.path.samefile(path, other)
    except (OSError, ValueError):  # the text isn't a path, or no file has this name
        return False


def delete_result(path: Path) -> None:
    """Delete a result of an earlier run, if it is a regular file; a link to it stays.

    Raises:
        UsageError: If the file can't be deleted.
    """
    with refusals(OSError):
        if path.is_file() and _is_replaced(path):
            Path(os.path.realpath(path)).unlink()


def write_results(result: Any, *files: tuple[Path | None, Callable[[Path, Any], None]]) -> None:
    """Write a result, which has been printed, into several files; None is no file.

    Raises:
        UsageError: Some cannot be written; all others are.
    """
    problems = []
    for path, write in files:
        try:
            if path is not None:
                write(path, result)
        except OSError as error:
            problems.append(f"{path} cannot be written: {error.strerror or error}")
    if problems:
        raise UsageError(f"{'; '.join(problems)}; the result is printed on standard output")
