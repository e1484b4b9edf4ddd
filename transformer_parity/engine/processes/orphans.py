"""End child processes whose parent has ended, however it ended: a process of its own, which waits for that.

A thread of each child could do the same, but not while compiled code holds the interpreter's lock; and Linux' own
``PR_SET_PDEATHSIG`` ends a child, but neither what the child has started nor its folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

ENDING = 5.0  # seconds in which processes end that were killed


def members(leader: int) -> list[int]:
    """Return the processes of a session; on Windows, which has none, a process and its descendants."""
    import psutil  # imported when needed: the process that waits starts faster without

    if os.name == "nt":
        with suppress(psutil.Error):
            return [leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))]
        return []
    found = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):  # it may end meanwhile
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def end_all(leader: int) -> None:
    """End the processes of a session, until there are none."""
    deadline = time.monotonic() + ENDING
    while (found := members(leader)) and time.monotonic() < deadline:  # one may start another meanwhile
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
        time.sleep(0.01)  # they take a moment to end


def watch(folder: str) -> None:
    """Read from standard input which children there are; when it ends, end those that are left and remove a folder.

    Args:
        folder: What is removed.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # sent to all processes of a terminal, or of a service
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    leaders: set[int] = set()
    for line in sys.stdin:  # "+17" has been started, "-17" has ended
        change = leaders.add if line[0] == "+" else leaders.discard
        change(int(line[1:]))
    for leader in leaders:
        end_all(leader)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1])
