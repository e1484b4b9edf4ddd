"""The log and the checkpoints of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOG, MODEL, CURVE = "log.jsonl", "model.safetensors", "curve.png"


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
    number = checkpoint.stem.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else 0


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run; of a step that was taken twice, because a run was resumed, the later one."""
    events: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate((folder / LOG).read_text("utf-8").splitlines()):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:  # the machine stopped in the middle of a line
            continue
        kind, step = event["event"], event["step"]
        if kind == "start":  # what had been logged beyond the checkpoint that it starts from is not part of the run
            events = {key: old for key, old in events.items() if old["step"] <= step}
        events[(kind, step, event.get("backend"), event.get("averaged"), number if kind == "start" else 0)] = event
    return sorted(events.values(), key=lambda event: event["step"])
