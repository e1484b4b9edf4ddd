"""How long a process has been silent, in seconds of its own: a busy machine makes it slower, but not silent."""

from __future__ import annotations

import time

import psutil


class Silence:
    """Counts the seconds since a process was last heard of in which it computed or slept.

    Seconds in which it waits for a processor are not its own. They cannot be read off everywhere, but bounded: they are
    at most those in which no processor that it may use is idle, and at most those in which it does not compute. A
    process that does not compute at all sleeps: then every second counts.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds = 0.0
        self._heard = False
        self._last = self._measure()

    def heard(self) -> None:
        """Count from here again."""
        self._heard = True

    def count(self, interval: float) -> float:
        """Return the seconds of silence, after adding those since the last measurement.

        Args:
            interval: Seconds between two measurements, with room for many ticks of the clock of processor time; twice
                as many are added at most: more have passed if this process was stopped.
        """
        if time.monotonic() - self._last[0] < interval:
            return 0.0 if self._heard else self._seconds
        before, self._last = self._last, self._measure()
        (start, used_before, idle_before), (now, used, idle) = before, self._last
        passed, computed = min(now - start, 2.0 * interval), used - used_before
        free = max((idle[name] - idle_before[name] for name in idle if name in idle_before), default=0.0)
        own = passed if computed == 0.0 else min(passed, max(computed, free))
        self._seconds = 0.0 if self._heard else self._seconds + own
        self._heard = False
        return self._seconds

    def _measure(self) -> tuple[float, float, dict[int, float]]:
        """Return the time, the processor time of the process and its descendants, and the idle time by processor."""
        idle = {i: times.idle for i, times in enumerate(psutil.cpu_times(percpu=True))}
        used = 0.0
        try:
            process = psutil.Process(self._pid)
            if hasattr(process, "cpu_affinity"):
                allowed = process.cpu_affinity()
                idle = {i: seconds for i, seconds in idle.items() if i in allowed}
            for one in (process, *process.children(recursive=True)):
                used += sum(one.cpu_times()[:4])  # user and system, also of its own children that have ended
        except psutil.Error:  # it has ended, which is noticed elsewhere
            pass
        return time.monotonic(), used, idle
