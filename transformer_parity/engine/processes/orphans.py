"""A watching process that kills the child processes of its parent process after the parent has exited.

A thread in each child couldn't do this reliably, because compiled code may hold the global interpreter lock. On Linux,
``PR_SET_PDEATHSIG`` would kill a child, but it would neither kill the child's descendants nor remove the directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

ENDING = 5.0  # maximum seconds to wait for killed processes to exit


def members(leader: int) -> list[int]:
    """Return the IDs of all processes in a session or, on Windows, of a process and its descendants."""
    import psutil  # imported only when needed, so that the watching process starts faster

    if os.name == "nt":
        with suppress(psutil.Error):
            return [leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))]
        return []
    found = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):  # the process may exit in the meantime
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def end_all(leader: int) -> None:
    """Kill the processes of a session until none are left, for at most five seconds."""
    deadline = time.monotonic() + ENDING
    while (found := members(leader)) and time.monotonic() < deadline:  # a process may start another before it is killed
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
        time.sleep(0.01)  # gives the processes time to exit


def watch(directory: str) -> None:
    """Track the running children via standard input. At the end of input, kill these children and remove ``directory``.

    Args:
        directory: The directory to remove.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # terminals and service managers also signal this process
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    leaders: set[int] = set()
    for line in sys.stdin:  # "+17": process 17 was started; "-17": it has exited
        change = leaders.add if line[0] == "+" else leaders.discard
        change(int(line[1:]))
    for leader in leaders:
        end_all(leader)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1])
