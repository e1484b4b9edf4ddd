"""Statistics for ``parity bench``: measurements of each implementation, time ratios, and growth exponents.

A time ratio compares two implementations in the same round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, median
from typing import Any

from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED

# Number of sizes to which growth exponents are fitted. Only the largest sizes are used, because constant costs dominate
# the times of smaller sizes.
FITTED = 3
TIMES = ("first_seconds", "seconds", "cores", "loaded_bytes", "peak_bytes")


class DisagreementError(Exception):
    """A result differs from the reference. The error message reports the location of the difference."""


@dataclass
class Entry:
    """The measurements of one implementation.

    Attributes:
        name: The name shown in tables.
        has_result: Whether the implementation returns a result to verify. A baseline doesn't return a result.
        verdict: AGREES if all results so far agree with the reference.
        problem: The reason why a result doesn't agree with the reference, or why the implementation couldn't be timed.
        near_ties: A description of the tokens that differ only because of rounding.
        environment: The versions, devices, and settings in the implementation's process.
        first_seconds: The duration of the first call in seconds, including compilation.
        seconds: The duration of the call in each round, in seconds.
        cores: The average number of busy cores in each round.
        loaded_bytes: The memory of the process before the first call (framework, weights, and inputs); None if unknown.
        peak_bytes: The peak memory of the process over all rounds; None if unknown.
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
        """Add the measurements of a round.

        Args:
            reply: The ``rounds.Reply`` to the call.
        """
        self.seconds.append(reply.seconds)
        self.cores.append(reply.processor_seconds / reply.seconds)
        if reply.peak_bytes is not None:
            self.peak_bytes = max(reply.peak_bytes, self.peak_bytes or 0)

    @property
    def work_bytes(self) -> int | None:
        """The difference between the peak memory and the memory before the first call; None if unknown."""
        if self.peak_bytes is None or self.loaded_bytes is None:
            return None
        return max(self.peak_bytes - self.loaded_bytes, 0)

    @property
    def is_timed(self) -> bool:
        """True if the implementation has been timed and all of its results agree with the reference."""
        return self.verdict == AGREES and bool(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as built-in Python types.

        If a result doesn't agree with the reference, all times are replaced with None.
        """
        times = {name: getattr(self, name) for name in TIMES}
        return {
            **{name: value for name, value in vars(self).items() if name not in times},
            **(times if self.is_timed else dict.fromkeys(times)),
            "median_seconds": Spread.of(self.seconds).median if self.is_timed else None,
        }


@dataclass(frozen=True)
class Spread:
    """The lowest value, the median, and the highest value of a set of measurements."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of a set of measurements."""
        return cls(min(values), median(values), max(values))


def ratio(entry: Entry, against: Entry) -> Spread:
    """Divide one entry's time by another entry's time in each round, and return the spread of these ratios."""
    return Spread.of([ours / theirs for ours, theirs in zip(entry.seconds, against.seconds, strict=False)])


def fastest(entries: Sequence[Entry]) -> Entry | None:
    """Return the entry with the lowest median time among entries with a result; None if no entry was timed."""
    timed = [entry for entry in entries if entry.is_timed and entry.has_result]
    return min(timed, key=lambda entry: median(entry.seconds), default=None)


def verdict(entries: Sequence[Entry]) -> str:
    """Return the worst verdict of all entries. An incorrect result is worse than a missing result."""
    return next((word for word in (DIVERGES, FAILED) if any(entry.verdict == word for entry in entries)), AGREES)


def median_seconds(entry: Entry) -> float | None:
    """Return the median time in seconds; None if the entry has no times."""
    return Spread.of(entry.seconds).median if entry.is_timed else None


def work_bytes(entry: Entry) -> int | None:
    """Return the memory in bytes that the workload requires; None if the entry has no times."""
    return entry.work_bytes if entry.is_timed else None


def at_sizes(
    name: str, races: Sequence[Sequence[Entry]], measure: Callable[[Entry], float | None]
) -> list[float | None]:
    """Return one implementation's measurement at each size; None for sizes without a measurement."""
    found = ([entry for entry in entries if entry.name == name] for entries in races)
    return [measure(entries[0]) if entries else None for entries in found]


def exponent(sizes: Sequence[int], measured: Sequence[float | None]) -> float | None:
    """Return the growth exponent of a measurement, fitted to the largest sizes; None for fewer than two sizes.

    The exponent is the slope of a least-squares line through the logarithms: 1 is linear growth, and 2 is quadratic.
    """
    found = [(math.log(size), math.log(x)) for size, x in zip(sizes, measured, strict=False) if x][-FITTED:]
    return linear_regression(*zip(*found, strict=True)).slope if len(found) > 1 else None


def exponents(sizes: Sequence[int], races: Sequence[Sequence[Entry]]) -> dict[str, dict[str, float | None]]:
    """Return the growth exponents of each implementation's time and memory."""
    return {
        name: {
            "seconds": exponent(sizes, at_sizes(name, races, median_seconds)),
            "work_bytes": exponent(sizes, at_sizes(name, races, work_bytes)),
        }
        for name in dict.fromkeys(entry.name for entries in races for entry in entries)
    }
