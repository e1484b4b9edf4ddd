"""Write files atomically, and write to pipes, devices, and standard output by path."""

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
    """Yield the path of a temporary file. At the end of the block, it replaces ``path`` unless an exception is raised.

    If the path is a symbolic link, its target is replaced. If the path refers to a pipe, a device, or standard output,
    the content of the temporary file is written there instead.

    Raises:
        OSError: If the file can't be written. The exception contains the path.
    """
    try:
        if _is_replaced(path):
            with _beside(Path(os.path.realpath(path))) as temporary:
                yield temporary
        else:
            with tempfile.TemporaryDirectory(prefix="parity-") as directory:
                yield (temporary := Path(directory, "content"))
                _write_into(path, temporary)
    except OSError as error:  # this error contains the temporary file's path or no path, so add the given path
        if error.strerror:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which then replaces ``path``.

    The new file and its directory entry are synced to disk, so that the old file can't reappear after a power failure.
    """
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
    """Return True if nothing exists at a path, or if the path refers to a regular file.

    The result is False if the file is this process's standard output or standard error.
    """
    return not path.exists() or (path.is_file() and _stream_at(path) is None)


def _stream_at(path: Path) -> int | None:
    """Return 1 or 2 if a path refers to this process's standard output or standard error, otherwise None."""
    return next((number for number in (1, 2) if os.path.samestat(path.stat(), os.fstat(number))), None)


def _write_into(path: Path, content: Path) -> None:
    """Write content to a pipe, a device, or a standard stream. The reader may close it at any time."""
    number = _stream_at(path)
    place = path if number is None else os.dup(number)  # opening a pipe fails if its reader has closed it
    with suppress(BrokenPipeError), content.open("rb") as source, open(place, "ab") as stream:
        shutil.copyfileobj(source, stream)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically. Characters that UTF-8 can't encode are written as escape sequences.

    Raises:
        OSError: If the file can't be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8", "backslashreplace")


def write_json(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Atomically write a value that consists of built-in Python types to a JSON file.

    Raises:
        OSError: If the file can't be written.
        ValueError: If a number is not finite.
    """
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def check_writable(*paths: Path | None) -> None:
    """Check that output files can be written, before any work is done. None entries are ignored.

    Raises:
        UsageError: If a path is a directory, or if the file or its directory can't be written.
    """
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise UsageError(f"there is no directory {path.parent}")
        if path.is_dir():
            raise UsageError(f"{path} must be a file: got a directory")
        try:
            if _is_replaced(path):
                tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
            elif not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def is_same_file(path: str, other: str) -> bool:
    """Return whether two paths refer to the same regular file. The file doesn't have to exist yet.

    Args:
        path: A path.
        other: A second path, or any other text, for which the result is False.
    """
    try:
        if not os.path.exists(path):
            return os.path.realpath(path) == os.path.realpath(other)
        return _is_replaced(Path(path)) and os.path.samefile(path, other)
    except (OSError, ValueError):  # the text isn't a path, or no file has this name
        return False


def delete_result(path: Path) -> None:
    """Delete the result file of an earlier run if it is a regular file. Delete only the target of a symbolic link.

    Raises:
        UsageError: If the file can't be deleted.
    """
    with refusals(OSError):
        if path.is_file() and _is_replaced(path):
            Path(os.path.realpath(path)).unlink()


def write_results(result: Any, *files: tuple[Path | None, Callable[[Path, Any], None]]) -> None:
    """Write a result, which has already been printed, to multiple files. None entries are ignored.

    Args:
        result: The result.
        files: The path of each file, and the function that writes it.

    Raises:
        UsageError: If a file can't be written. All other files are still written.
    """
    problems = []
    for path, write in files:
        try:
            if path is not None:
                write(path, result)
        except OSError as error:
            problems.append(f"{path} cannot be written: {error.strerror or error}")
    if problems:
        raise UsageError(f"{'; '.join(problems)}; the result was printed to standard output")
