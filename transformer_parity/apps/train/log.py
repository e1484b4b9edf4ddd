"""The directory of a training run, which contains a log and checkpoints and is locked during the run."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformer_parity.engine.system.errors import UsageError, printable

LOG, MODEL, CURVE, RESULT = "log.jsonl", "model.safetensors", "curve.png", "result.json"
# Names of temporary files that this project or safetensors writes. If a process is killed, these files remain.
WRITTEN = "|".join(map(re.escape, (MODEL, CURVE, RESULT)))
LEFT = re.compile(rf"\.(checkpoint-.*|({WRITTEN})\..*)\.tmp|\.tmp[A-Za-z0-9]{{6}}")

FIELDS: dict[str, dict[str, Any]] = {  # types of the fields that curves require in addition to the step
    "start": {"task": str},
    "step": {"loss": dict},
    "validation": {"backend": str, "averaged": int, "loss": float | int, "score": float | int},
}
SHOWN = 60  # maximum number of bytes of an invalid line to show in an error message


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory of a run. Create the directory if necessary, and delete temporary files of killed processes.

    The process locks the log file. When the process ends for any reason, the operating system releases the lock. If the
    run writes no files, the directory is removed at the end.

    Raises:
        OSError: If another run has locked the directory or the directory is not writable.
    """
    made = [one for one in (directory, *directory.parents) if not one.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOG
    with path.open("ab") as log:
        _lock(log.fileno(), directory)
        _remove_unfinished(directory)
        try:
            yield
        finally:
            with suppress(OSError):  # a nonempty directory cannot be removed
                _remove_unfinished(directory)
                if not path.stat().st_size:
                    path.unlink()
                for one in made:
                    one.rmdir()


def _remove_unfinished(directory: Path) -> None:
    for path in directory.glob(".*"):
        if LEFT.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _lock(file: int, directory: Path) -> None:
    """Lock an open file. Do nothing if the file system does not support locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            # On Windows, other processes cannot read a locked range, so lock a range beyond the end of the file.
            os.lseek(file, 1 << 30, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise BlockingIOError(
            f"another process is training in {directory}; specify a different directory with --out"
        ) from error
    except OSError:
        pass


class Log:
    """A log with one JSON object per line. New events are appended."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:  # an earlier process was killed while writing a line
            self._file.write("\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append an event."""
        self._file.write(json.dumps({"event": event, **fields}) + "\n")

    def flush(self) -> None:
        """Flush buffered events to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the log."""
        self._file.close()


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, sorted by step."""
    return sorted(directory.glob("checkpoint-*.safetensors"), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's file name, or 0 if the file was renamed."""
    return 0 if was_renamed(checkpoint) else int(_number(checkpoint))


def was_renamed(checkpoint: Path) -> bool:
    """Return whether the user has renamed a checkpoint, in which case its file name contains no step."""
    return not _number(checkpoint).isdecimal()


def _number(checkpoint: Path) -> str:
    return checkpoint.stem.removeprefix("checkpoint-")


def read_log(directory: Path) -> list[dict[str, Any]]:
    """Return the events of a run, sorted by step.

    If the run was resumed from a checkpoint that was not the last one, some steps appear twice in the log. For these
    steps, only the events of the resumed run are returned.

    Raises:
        OSError: If the log cannot be read.
        UsageError: If a line is not an event or is not UTF-8.
    """
    events: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate((directory / LOG).read_bytes().splitlines(), start=1):
        shown = printable(line[:SHOWN].decode("utf-8", "replace")) + " ..." * (len(line) > SHOWN)
        try:
            event = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"line {number} of {directory / LOG} must be UTF-8: got {shown}") from error
        except (ValueError, RecursionError):  # incomplete line of a process that was killed
            continue
        if not _is_event(event):
            raise UsageError(f"line {number} of {directory / LOG} must be an event of a run: got {shown}")
        kind, step = event["event"], event["step"]
        if kind == "start":  # discard events after the checkpoint that the run resumed from
            events = {key: old for key, old in events.items() if old["step"] <= step}
        events[(kind, step, event.get("backend"), event.get("averaged"), number if kind == "start" else 0)] = event
    return sorted(events.values(), key=lambda event: event["step"])


def _is_event(event: Any) -> bool:
    """Return whether a JSON value is an event that has all required fields."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    needed = {"step": int, **FIELDS.get(event["event"], {})}
    return all(isinstance(event.get(name), kind) for name, kind in needed.items())
