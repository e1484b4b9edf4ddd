"""Measure how long a process has been silent, not including the time that it waits for a CPU core.

On a busy machine, processes become slower. A slow process must not be mistaken for a process that hangs.
"""

from __future__ import annotations

import time

import psutil


class Silence:
    """The total time in seconds that a process has spent computing and sleeping since its last message.

    The time that a process waits for a CPU core is excluded. Because some operating systems don't report this waiting
    time, it is estimated from two upper bounds: the time during which none of the allowed cores is idle, and the time
    during which the process doesn't compute. A process that doesn't use any CPU time between two measurements is
    assumed to sleep. The time between these measurements is added to the number of seconds.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds = 0.0
        self._heard = False
        self._last = self._measure()

    def heard(self) -> None:
        """Reset the number of seconds to 0, because a message has arrived."""
        self._heard = True

    def count(self, interval: float) -> float:
        """Return the number of seconds since the last message, without the time spent waiting for a core.

        Args:
            interval: Minimum number of seconds between two measurements. It must be much longer than a tick of the CPU
                time clock. If the time between two measurements is longer than twice the interval, this process itself
                was suspended. Therefore, each measurement adds at most twice the interval to the result.
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
        """Return the time, the CPU time of the process and its descendants, and the idle time of each CPU core."""
        idle = {i: times.idle for i, times in enumerate(psutil.cpu_times(percpu=True))}
        used = 0.0
        try:
            process = psutil.Process(self._pid)
            if hasattr(process, "cpu_affinity"):
                allowed = process.cpu_affinity()
                idle = {i: seconds for i, seconds in idle.items() if i in allowed}
            for one in (process, *process.children(recursive=True)):
                used += sum(one.cpu_times()[:4])  # user and system time, including children that have exited
        except psutil.Error:  # the process has exited, which ``Child`` detects
            pass
        return time.monotonic(), used, idle
