"""The statistics of ``parity bench``: the measurements of each participant, and ratios from round to round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, median
from typing import Any

from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED

FITTED = 3  # sizes, the largest: at small ones, what does not grow is most of the time
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


def median_seconds(entry: Entry) -> float | None:
    """Return the median of the times; None if there is none."""
    return Spread.of(entry.seconds).median if entry.is_timed else None


def work_bytes(entry: Entry) -> int | None:
    """Return the memory of the work; None if there is no time either."""
    return entry.work_bytes if entry.is_timed else None


def at_sizes(
    name: str, races: Sequence[Sequence[Entry]], measure: Callable[[Entry], float | None]
) -> list[float | None]:
    """Return what is measured of a participant at each size; None where it is not."""
    found = ([entry for entry in entries if entry.name == name] for entries in races)
    return [measure(entries[0]) if entries else None for entries in found]


def exponent(sizes: Sequence[int], measured: Sequence[float | None]) -> float | None:
    """Return the power of the size that something grows with, fitted to the largest sizes; None without two of them.

    It is the slope of a line through their logarithms, by least squares: 1 is linear, 2 quadratic.
    """
    found = [(math.log(size), math.log(x)) for size, x in zip(sizes, measured, strict=False) if x][-FITTED:]
    return linear_regression(*zip(*found, strict=True)).slope if len(found) > 1 else None


def exponents(sizes: Sequence[int], races: Sequence[Sequence[Entry]]) -> dict[str, dict[str, float | None]]:
    """Return those of the time and the memory of each participant."""
    return {
        name: {
            "seconds": exponent(sizes, at_sizes(name, races, median_seconds)),
            "work_bytes": exponent(sizes, at_sizes(name, races, work_bytes)),
        }
        for name in dict.fromkeys(entry.name for entries in races for entry in entries)
    }
