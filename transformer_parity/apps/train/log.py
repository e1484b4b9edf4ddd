"""The folder of a training run: its lock, its log and its checkpoints."""

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
# The name of a file that was never finished: of one of ours, or of what safetensors writes it to.
WRITTEN = "|".join(map(re.escape, (MODEL, CURVE, RESULT)))
LEFT = re.compile(rf"\.(checkpoint-.*|({WRITTEN})\..*)\.tmp|\.tmp[A-Za-z0-9]{{6}}")

FIELDS: dict[str, dict[str, Any]] = {  # of events that a curve is drawn of, beside the step: their types
    "start": {"task": str},
    "step": {"loss": dict},
    "validation": {"backend": str, "averaged": int, "loss": float | int, "score": float | int},
}
SHOWN = 60  # bytes of a line that is refused


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, and remove what a process that was killed has left half written there.

    The folder is made; if nothing is written into it, it vanishes again. What is locked is the log: the system lets go
    of it when the process ends, however it ends.

    Raises:
        OSError: Another run has the folder, or nothing can be written there.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOG
    with path.open("ab") as log:
        _lock(log.fileno(), folder)
        _remove_unfinished(folder)
        try:
            yield
        finally:
            with suppress(OSError):  # a folder that is not empty stays
                _remove_unfinished(folder)
                if not path.stat().st_size:
                    path.unlink()
                for one in made:
                    one.rmdir()


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(".*"):
        if LEFT.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _lock(file: int, folder: Path) -> None:
    """Lock an open file; where the file system has no locks, nothing is locked."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file, 1 << 30, os.SEEK_SET)  # behind the end: there, what is locked cannot be read
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise BlockingIOError(f"another process is writing into {folder}: choose another folder with --out") from error
    except OSError:
        pass


class Log:
    """One JSON object a line, appended."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:  # the machine stopped in the middle of a line
            self._file.write("\n")

    def write(self, event: str, **fields: Any) -> None:
        """Add a line."""
        self._file.write(json.dumps({"event": event, **fields}) + "\n")

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, the oldest first."""
    return sorted(folder.glob("checkpoint-*.safetensors"), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name; 0 if the file was renamed."""
    return 0 if was_renamed(checkpoint) else int(_number(checkpoint))


def was_renamed(checkpoint: Path) -> bool:
    """Whether a checkpoint has no number in its name, which every run gives it."""
    return not _number(checkpoint).isdecimal()


def _number(checkpoint: Path) -> str:
    return checkpoint.stem.removeprefix("checkpoint-")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run; of a step that was taken twice, because a run was resumed, the later one.

    Raises:
        OSError: The log cannot be read.
        UsageError: A line is no event of a run, or not UTF-8.
    """
    events: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate((folder / LOG).read_bytes().splitlines(), start=1):
        shown = printable(line[:SHOWN].decode("utf-8", "replace")) + " ..." * (len(line) > SHOWN)
        try:
            event = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"line {number} of {folder / LOG} must be UTF-8: got {shown}") from error
        except (ValueError, RecursionError):  # the machine stopped in the middle of a line
            continue
        if not _is_event(event):
            raise UsageError(f"line {number} of {folder / LOG} must be an event of a run: got {shown}")
        kind, step = event["event"], event["step"]
        if kind == "start":  # what had been logged beyond the checkpoint that it starts from is not part of the run
            events = {key: old for key, old in events.items() if old["step"] <= step}
        events[(kind, step, event.get("backend"), event.get("averaged"), number if kind == "start" else 0)] = event
    return sorted(events.values(), key=lambda event: event["step"])


def _is_event(event: Any) -> bool:
    """Whether what a line holds has all that is read of an event of its kind."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    needed = {"step": int, **FIELDS.get(event["event"], {})}
    return all(isinstance(event.get(name), kind) for name, kind in needed.items())
