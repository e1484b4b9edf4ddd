"""Convert a recording to the data that the page shows.

For attention scores, attention weights, the first wrong tap, and the inputs of the first wrong tap, the page contains
each value. For all other taps, it contains only norms over the channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.localization import Evidence
from transformer_parity.engine.report.buffer import Buffer
from transformer_parity.transformer.diagnose.evidence.blame import Subject
from transformer_parity.transformer.explore.recording import Recorded, Recording, recording_of

# Suffixes of the names of taps that contain one value per query and key
ATTENTION = (".scores", ".weights", "relative_bias.output")
# Maximum total number of attention scores and weights on a page. For a sentence pair with
# 20 source tokens and 20 target tokens, the base model computes fewer scores and weights, so all tokens are shown.
MOST_WEIGHTS = 150_000
MOST_CHANNELS = 2048  # maximum number of channels for which full values are stored
SIDES = ("source", "target")


def view(recording: Recording, title: str, tokens: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, Any]:
    """Return the data that the page shows, as built-in Python types.

    Args:
        recording: The taps of a batch. The page shows only one sentence of the batch.
        title: The title of the page.
        tokens: The ``source`` and ``target`` tokens of each sentence as text.
    """
    row = recording.sentence
    shown = {side: list(tokens[side][row]) for side in SIDES}
    windows, notes = _windows(recording, row, shown)
    if len(tokens["source"]) > 1:
        shown_of = f"Values are shown for sentence {row + 1} of {len(tokens['source'])}."
        notes.insert(0, f"{shown_of} Errors and tolerances apply to all sentences.")
    buffer = Buffer()
    taps = [_Tap(name, recording, row).entry(windows, buffer) for name in recording.expected]
    return {
        "title": title,
        "dtype": recording.dtype,
        "tokens": {side: shown[side][windows[side]] for side in SIDES},
        "starts": {side: windows[side].start for side in SIDES},
        "notes": notes,
        "ports": [port.name for port in recording.ports],
        "taps": taps,
        "size": buffer.size,
        "data": buffer.encoded(),
    }


def view_of_case(evidence: Evidence, subject: Subject) -> dict[str, Any]:
    """Return the data that a report shows about a case with a difference. Tokens are shown as IDs."""
    config = subject.case.config
    special = {config.pad_id: "<pad>", config.bos_id: "<s>", config.eos_id: "</s>"}
    tokens = {
        side: [[special.get(token, str(token)) for token in row] for row in subject.inputs[f"{side}_ids"].tolist()]
        for side in SIDES
    }
    return view(recording_of([evidence], subject), f"{subject.dtype} {subject.case.name}", tokens)


def side_of(tap: str) -> str:
    """Return ``source`` if the rows of a tap correspond to source positions, else ``target``."""
    of_memory = tap.endswith(("cross_attention.key", "cross_attention.value"))
    return "source" if of_memory or tap.startswith(("encoder.", "source_")) else "target"


def keys_of(tap: str) -> str:
    """Return ``source`` if the columns of scores or weights correspond to source positions, else ``target``."""
    return "source" if ".cross_attention." in tap else side_of(tap)


def _windows(recording: Recording, row: int, tokens: Mapping[str, Sequence[str]]) -> tuple[dict[str, slice], list[str]]:
    """Return the positions to show for source and target, and notes about omitted positions.

    If the sentence is too long, show only the positions around the largest difference.
    """
    heads = [value.shape[1] for name, value in recording.expected.items() if name.endswith(ATTENTION)]
    most = max(8, math.isqrt(MOST_WEIGHTS // max(sum(heads), 1)))
    windows, notes = {}, []
    for side in SIDES:
        length = len(tokens[side])
        start = max(0, min(_worst(recording, row, side) - most // 2, length - most))
        windows[side] = slice(start, min(length, start + most))
        if length > most:
            notes.append(
                f"Only {side} tokens {start} to {start + most - 1} (counting from 0) of {length} are shown. Errors and "
                "tolerances apply to all tokens."
            )
    return windows, notes


def _worst(recording: Recording, row: int, side: str) -> int:
    """Return the source or target position at which a port's first wrong tap has the largest error.

    ``side`` selects source or target positions. The function uses the first port whose first wrong tap has such
    positions and the correct shape. If there is no such port, the result is 0.
    """
    for port in recording.ports:
        name = port.first_over
        if name is not None and side_of(name) == side and port.actual[name].shape == recording.expected[name].shape:
            apart = np.nan_to_num(np.abs(_row(port.actual[name] - recording.expected[name], row)), nan=np.inf)
            return int(np.moveaxis(apart, -2, 0).reshape(apart.shape[-2], -1).max(1).argmax())
    return 0


def _row(value: ndarray, row: int) -> ndarray:
    """Return the values of one sentence. A relative position bias has only one row, which all sentences share."""
    return value[min(row, len(value) - 1)]


class _Tap:
    """One tap of a recording."""

    def __init__(self, name: str, recording: Recording, row: int) -> None:
        self.name, self.recording, self.row = name, recording, row
        self.is_attention = name.endswith(ATTENTION)
        of_interest = {*recording.feeds, *(feed for feeds in recording.feeds.values() for feed in feeds)}
        self.is_full = self.is_attention or name in of_interest

    def entry(self, windows: Mapping[str, slice], buffer: Buffer) -> dict[str, Any]:
        """Return the data of the tap, and append its values to the buffer."""
        expected = self._cut(self.recording.expected[self.name], windows)
        found = [self._of_port(port, windows) for port in self.recording.ports]
        entry: dict[str, Any] = {"name": self.name, "full": self.is_full, "rows": side_of(self.name), "note": ""}
        if self.is_attention:
            entry["columns"] = keys_of(self.name)
        elif self.is_full:
            entry["columns"] = "channel"
            if (width := expected.shape[-1]) > MOST_CHANNELS:
                kept = _channels(expected, found)
                entry["note"] = f"Only the {len(kept):,} of {width:,} channels that differ most are shown."
                entry["channels"] = kept.tolist()
                expected = expected[..., kept]
                found = [None if value is None else value[..., kept] for value in found]
        reference = expected if self.is_full else np.linalg.norm(expected, axis=-1)
        entry["shape"] = list(reference.shape)
        entry["reference"] = buffer.add(reference)
        both = zip(self.recording.ports, found, strict=True)
        entry["ports"] = [self._port_entry(port, value, expected, buffer) for port, value in both]
        return entry

    def _cut(self, value: ndarray, windows: Mapping[str, slice]) -> ndarray:
        """Return the values of all heads [N, L, n] for the sentence and the positions to show."""
        value = _row(value, self.row)
        value = value.reshape(-1, *value.shape[-2:])[:, windows[side_of(self.name)]]
        return value[..., windows[keys_of(self.name)]] if self.is_attention else value

    def _of_port(self, port: Recorded, windows: Mapping[str, slice]) -> ndarray | None:
        """Return the port's values that the page shows, or None if the port doesn't report them in the right shape."""
        value = port.actual.get(self.name)
        if value is None or value.shape != self.recording.expected[self.name].shape:
            return None
        return self._cut(value, windows)

    def _port_entry(
        self, port: Recorded, value: ndarray | None, expected: ndarray, buffer: Buffer
    ) -> dict[str, Any] | None:
        """Return a port's errors and the offsets of the port's values, or None if the port doesn't return this tap."""
        mark = next((mark for mark in port.marks if mark.name == self.name), None)
        if mark is None:
            return None
        entry: dict[str, Any] = {
            "error": _number(mark.free),
            "isolated": _number(mark.isolated),
            "tolerance": _number(mark.tolerance),
            "verdict": mark.verdict,
        }
        if value is None:
            theirs, ours = port.actual[self.name].shape, self.recording.expected[self.name].shape
            return {**entry, "problem": f"the shape is {list(theirs)} instead of {list(ours)}"}
        if self.is_full:
            return {**entry, "values": buffer.add(value, expected)}
        with np.errstate(all="ignore"):  # values of an incorrect port may overflow
            norms, apart = (np.linalg.norm(one, axis=-1) for one in (value, value - expected))
        place = buffer.add(norms, np.linalg.norm(expected, axis=-1))
        return {**entry, "values": place, "apart": buffer.add(apart)}


def _channels(expected: ndarray, found: Sequence[ndarray | None]) -> ndarray:
    """Return the indices of the channels that differ most, in ascending order."""
    apart = np.zeros(expected.shape[-1])
    for value in found:
        if value is not None:
            apart = np.maximum(apart, np.nan_to_num(np.abs(value - expected), nan=np.inf).max((0, 1)))
    return np.sort(np.argsort(-apart, kind="stable")[:MOST_CHANNELS])


def _number(value: float) -> float | str:
    """Return a finite number unchanged, and infinity or NaN as a string, because JSON doesn't support them."""
    return value if math.isfinite(value) else str(value)
