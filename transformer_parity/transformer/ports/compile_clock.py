"""How long compiling takes: the seconds that a framework has spent on it in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spent:
    """Where the time of a port's process went, in seconds."""

    seconds: float  # from its start to its end
    cpu_seconds: float  # on all cores; the same also beside other work
    compiling: float  # tracing and compiling, of the first; 0 where nothing is compiled
    parts: Mapping[str, float] = field(default_factory=dict)  # of the second: importing, and each stage in each dtype


class Clock:
    """Adds up spans of time; one inside of another counts once."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._spans: list[tuple[float, float]] = []  # apart from one another, in order

    @property
    def seconds(self) -> float:
        """The sum."""
        return sum(end - start for start, end in self._spans)

    def add(self, seconds: float) -> None:
        """Count what has taken so long and ends now."""
        end = self._now()
        start = end - seconds
        while self._spans and self._spans[-1][1] > start:
            start = min(start, self._spans.pop()[0])
        self._spans.append((start, end))

    @contextmanager
    def running(self) -> Iterator[Callable[[], None]]:
        """Count what is done meanwhile, or only until what is yielded is called."""
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
    """Let ``COMPILING`` hear of all that JAX traces, lowers and compiles."""
    import jax

    def hear(event: str, duration_secs: float, **about: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            COMPILING.add(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(hear)
