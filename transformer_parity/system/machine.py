"""The machine: processor, memory, versions."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DISTRIBUTION = "transformer-parity"


def processor() -> str:
    """Return the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release() -> str:
    """Return the version of this distribution."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed, run from its folder"


def describe_machine() -> dict[str, Any]:
    """Return what the comparison runs on."""
    return {
        DISTRIBUTION: release(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def forget_peak() -> None:
    """Let the peak of memory be counted from here; Linux alone can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int | None:
    """Return the most memory that this process has held, since its peak was forgotten where that is possible."""
    if (bytes_held := _status("VmHWM")) is not None:
        return bytes_held
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def held_bytes() -> int | None:
    """Return the memory that this process holds; None where the system does not report it."""
    return _status("VmRSS")


def _status(field: str) -> int | None:
    """Return a number of bytes that Linux keeps of this process."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return None
