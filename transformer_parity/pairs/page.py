"""Write the explorer page of a comparison: every tensor of one batch, side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.localization import INTRODUCED, Mark
from transformer_parity.engine.report.buffer import Buffer
from transformer_parity.engine.report.page import write_page
from transformer_parity.engine.tensors import Tensors
from transformer_parity.pairs.compare.stages import plain_name
from transformer_parity.pairs.result import PairResult

MOST_VALUES = 50_000  # a tensor with more values in one sequence is shown as norms, unless a difference starts there
MOST_SHOWN = 400_000


def write(path: Path, result: PairResult) -> None:
    """Write a page that shows one sequence of the batch that was examined.

    Raises:
        OSError: If the file can't be written.
    """
    verdict = result.verdict.word
    about = [f"{verdict} with {result.original}."]
    about += [f"The difference starts at {place}." for place in result.introduced[:1]]
    about += [f"Cause: {named.sentence}." for named in result.named]
    write_page(path, _view(result), about)


def _view(result: PairResult) -> dict[str, Any]:
    recorded = result.recorded
    row = _worst_row(recorded.expected, recorded.actual, recorded.marks)
    buffer = Buffer()
    taps = [
        _tap(mark, recorded.expected[mark.name], recorded.actual.get(mark.name), row, buffer)
        for mark in recorded.marks
        if mark.name in recorded.expected
    ]
    longest = max((tap["shape"][1] for tap in taps), default=1)
    notes = [f"Values are shown for index {row} of the first axis. Errors and tolerances apply to all values."]
    return {
        "title": f"{result.port} and {result.original}",
        "dtype": recorded.dtype,
        "trusted": "original",
        "tokens": {"row": [str(i) for i in range(longest)]},
        "starts": {"row": 0},
        "notes": notes + result.notes,
        "ports": [result.port],
        "taps": taps,
        "size": buffer.size,
        "data": buffer.encoded(),
    }


def _worst_row(expected: Tensors, actual: Tensors, marks: tuple[Mark, ...]) -> int:
    """Return the index of the first axis with the largest error in the first wrong tensor."""
    for mark in marks:
        mine, theirs = actual.get(mark.name), expected.get(mark.name)
        if not mark.free <= mark.tolerance and mine is not None and theirs is not None and mine.shape == theirs.shape:
            if not theirs.ndim:
                continue
            apart = np.abs(np.asarray(mine, np.float64) - theirs).reshape(len(theirs), -1)
            return int(np.nan_to_num(apart, nan=np.inf).max(1).argmax())
    return 0


def _tap(mark: Mark, expected: ndarray, actual: ndarray | None, row: int, buffer: Buffer) -> dict[str, Any]:
    """Return the data of a tensor, and append its values to the buffer."""
    right = _cut(expected, row)
    is_full = right.size <= (MOST_SHOWN if mark.verdict == INTRODUCED else MOST_VALUES)
    reference = right if is_full else np.linalg.norm(right, axis=-1)
    entry = {"name": plain_name(mark.name), "full": is_full, "rows": "row", "note": ""}
    if is_full:
        entry["columns"] = "channel"
    port: dict[str, Any] = {
        "error": mark.free if math.isfinite(mark.free) else str(mark.free),
        "isolated": mark.isolated if math.isfinite(mark.isolated) else str(mark.isolated),
        "tolerance": mark.tolerance,
        "verdict": mark.verdict,
    }
    entry |= {"shape": list(reference.shape), "reference": buffer.add(reference), "ports": [port]}
    if actual is None or actual.shape != expected.shape:
        port["problem"] = f"the shape is {None if actual is None else list(actual.shape)}"
        return entry
    mine = _cut(actual, row)
    if is_full:
        port["values"] = buffer.add(mine, right)
    else:
        port["values"] = buffer.add(np.linalg.norm(mine, axis=-1), reference)
        port["apart"] = buffer.add(np.linalg.norm(mine - right, axis=-1))
    return entry


def _cut(value: ndarray, row: int) -> ndarray:
    """Return the values [N, L, n] at one index of the first axis, without infinite values."""
    value = np.nan_to_num(np.asarray(value, np.float64), posinf=0.0, neginf=0.0)
    value = value[min(row, len(value) - 1)] if value.ndim > 1 else value
    return value.reshape(-1, *value.shape[-2:]) if value.ndim >= 2 else value.reshape(1, 1, -1)
