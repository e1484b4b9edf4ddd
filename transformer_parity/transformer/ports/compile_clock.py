"""A clock that measures how long a framework has spent compiling in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spent:
    """The wall-clock and CPU time of a port's process.

    Attributes:
        seconds: Wall-clock time from start to end, in seconds.
        cpu_seconds: CPU time on all cores, in seconds. Unlike wall-clock time, CPU time barely depends on other
            processes.
        compiling: Wall-clock time spent on tracing and compiling, in seconds; 0 if the framework doesn't compile.
        parts: CPU time in seconds by task: the import, each stage in each dtype, and everything else.
    """

    seconds: float
    cpu_seconds: float
    compiling: float
    parts: Mapping[str, float] = field(default_factory=dict)


class Clock:
    """A clock that adds up time spans. If spans overlap, the total includes the overlap only once."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._spans: list[tuple[float, float]] = []  # sorted and without overlaps

    @property
    def seconds(self) -> float:
        """Total length of the spans, in seconds."""
        return sum(end - start for start, end in self._spans)

    def add(self, seconds: float) -> None:
        """Add a time span with the given length that ends now."""
        end = self._now()
        start = end - seconds
        while self._spans and self._spans[-1][1] > start:
            start = min(start, self._spans.pop()[0])
        self._spans.append((start, end))

    @contextmanager
    def running(self) -> Iterator[Callable[[], None]]:
        """Time a block of code. Calling the yielded function stops the clock before the block ends."""
        start, stopped = self._now(), False

        def stop() -> None:
            nonlocal stopped
            if not stopped:
                self.add(self._now() - start)
            stopped = True

        try:
            yield stop
        finally:
            stop()


COMPILING = Clock()


def listen_to_jax() -> None:
    """Add the time that JAX spends on tracing, lowering, and compiling to ``COMPILING``."""
    import jax

    def hear(event: str, duration_secs: float, **about: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            COMPILING.add(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(hear)
