"""The statistics of ``parity bench``: the measurements of each participant, and ratios from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from transformer_parity.compare.findings import AGREES, DIVERGES, FAILED

TIMES = ("first_seconds", "seconds", "cores", "loaded_bytes", "peak_bytes")


class DisagreementError(Exception):
    """A result differs from that of the reference; the message has the place."""


@dataclass
class Entry:
    """A participant and its measurements.

    Attributes:
        name: What it is called in tables.
        has_result: Whether there is a result to verify; without one, it is a baseline.
        verdict: AGREES as long as every result did.
        problem: Why it does not, or why it could not be timed.
        near_ties: Where its tokens differ, and may.
        environment: Versions, devices and switches of its process.
        first_seconds: How long the first call took, compilation included.
        seconds: How long the call of each round took.
        cores: How many cores it kept busy in each round.
        loaded_bytes: The memory that its process held before the first call: framework, weights, inputs.
        peak_bytes: The most memory that its process held in a round; None as above.
    """

    name: str
    has_result: bool = True
    verdict: str = AGREES
    problem: str = ""
    near_ties: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    first_seconds: float | None = None
    seconds: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    loaded_bytes: int | None = None
    peak_bytes: int | None = None

    def add(self, reply: Any) -> None:
        """Keep what a round took, as ``rounds.Reply`` has it."""
        self.seconds.append(reply.seconds)
        self.cores.append(reply.processor_seconds / reply.seconds)
        if reply.peak_bytes is not None:
            self.peak_bytes = max(reply.peak_bytes, self.peak_bytes or 0)

    @property
    def work_bytes(self) -> int | None:
        """How much more memory its process held in a round than before the first call."""
        if self.peak_bytes is None or self.loaded_bytes is None:
            return None
        return max(self.peak_bytes - self.loaded_bytes, 0)

    @property
    def is_timed(self) -> bool:
        """Whether there are times, and all that they stand for agrees."""
        return self.verdict == AGREES and bool(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; no times without agreement."""
        times = {name: getattr(self, name) for name in TIMES}
        return {
            **{name: value for name, value in vars(self).items() if name not in times},
            **(times if self.is_timed else dict.fromkeys(times)),
            "median_seconds": Spread.of(self.seconds).median if self.is_timed else None,
        }


@dataclass(frozen=True)
class Spread:
    """The middle of some measurements, and their extremes."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise measurements."""
        return cls(min(values), median(values), max(values))


def ratio(entry: Entry, against: Entry) -> Spread:
    """Return how many times as long one takes as the other, from round to round."""
    return Spread.of([ours / theirs for ours, theirs in zip(entry.seconds, against.seconds, strict=False)])


def fastest(entries: Sequence[Entry]) -> Entry | None:
    """Return the entry with a result and the lowest median; None if none was timed."""
    timed = [entry for entry in entries if entry.is_timed and entry.has_result]
    return min(timed, key=lambda entry: median(entry.seconds), default=None)


def verdict(entries: Sequence[Entry]) -> str:
    """Return the worst: a wrong result before one that is missing."""
    return next((word for word in (DIVERGES, FAILED) if any(entry.verdict == word for entry in entries)), AGREES)
