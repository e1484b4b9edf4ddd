"""The machine: processor, memory, versions, and what the command line needs installed."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformer_parity import __version__
from transformer_parity.engine.system.errors import UsageError

DISTRIBUTION = "transformer-parity"
LIBRARIES = ("jinja2", "matplotlib", "psutil", "rich", "sacrebleu", "sentencepiece")  # the modules of [cli]

INSTRUCTIONS = {"AVX2": "avx2", "AVX-512": "avx512f", "AMX": "amx_tile"}  # as /proc/cpuinfo names them


def needs() -> str:
    """Return what the command line needs that is not installed, and how to install it; empty if nothing is missing."""
    missing = ", ".join(name for name in LIBRARIES if find_spec(name) is None)
    return missing and f"needs {missing}, not installed here: pip install '{DISTRIBUTION}[cli]'"


def processor() -> str:
    """Return the name of the processor, and which of the instructions it has that decide how fast products are."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        entries = {key.strip(): value.split() for key, _, value in (line.partition(":") for line in text.splitlines())}
        name = " ".join(entries.get("model name", [name]))
        units = [unit for unit, flag in INSTRUCTIONS.items() if flag in entries.get("flags", [])]
        name += f" ({', '.join(units)})" * bool(units)
    return name


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    """Return what the comparison runs on."""
    return {
        DISTRIBUTION: __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cpus": os.cpu_count(),
    }


def held_bytes() -> int:
    """Return the memory that this process holds."""
    import psutil

    return psutil.Process().memory_info().rss


def free_bytes() -> int:
    """Return the memory that processes can still be given."""
    import psutil

    return psutil.virtual_memory().available


def check_memory(needed: int, what: str) -> None:
    """Refuse, before it is begun, what cannot be done in the memory that is free.

    Args:
        needed: The least bytes that it takes.
        what: What takes them.

    Raises:
        UsageError: More memory is needed than is free.
    """
    free = free_bytes()
    if needed > free:
        raise UsageError(f"{what} takes {needed / 2**30:,.0f} GiB of memory or more: {free / 2**30:,.1f} GiB are free")


CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")  # Linux alone lets a peak be forgotten,
# and psutil neither does that nor reads the peak.


def forget_peak() -> None:
    """Let the peak of memory be counted from here, where the system can."""
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text("5")


def peak_bytes() -> int:
    """Return the most memory that this process has held, since its peak was forgotten where that is possible."""
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
