"""Information about the machine (CPU, memory, versions), and the packages that the ``parity`` command requires."""

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
LIBRARIES = ("jinja2", "matplotlib", "psutil", "rich", "sacrebleu", "sentencepiece")  # installed by [cli]

INSTRUCTIONS = {"AVX2": "avx2", "AVX-512": "avx512f", "AMX": "amx_tile"}  # values are flags in /proc/cpuinfo


def needs() -> str:
    """Return a message that lists the required packages that aren't installed.

    If all packages are installed, return an empty string.
    """
    missing = ", ".join(name for name in LIBRARIES if find_spec(name) is None)
    return missing and f"requires packages that are not installed ({missing}): pip install '{DISTRIBUTION}[cli]'"


def processor() -> str:
    """Return the name of the CPU, and the instruction sets that affect the CPU's matmul throughput."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        entries = {key.strip(): value.split() for key, _, value in (line.partition(":") for line in text.splitlines())}
        name = " ".join(entries.get("model name", [name]))
        units = [unit for unit, flag in INSTRUCTIONS.items() if flag in entries.get("flags", [])]
        name += f" ({', '.join(units)})" * bool(units)
    return name


def processors() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    """Return the versions of this package and Python, the operating system, and the CPU."""
    return {
        DISTRIBUTION: __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cpus": os.cpu_count(),
    }


def held_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    import psutil

    return psutil.Process().memory_info().rss


def free_bytes() -> int:
    """Return the available memory of the machine in bytes."""
    import psutil

    return psutil.virtual_memory().available


def check_memory(needed: int, what: str) -> None:
    """Check that enough memory is available, before an operation starts.

    Args:
        needed: The minimum number of bytes that the operation requires.
        what: The name of the operation, for the error message.

    Raises:
        UsageError: If less memory is available.
    """
    free = free_bytes()
    if needed > free:
        raise UsageError(
            f"{what} requires at least {needed / 2**30:,.0f} GiB of memory: only {free / 2**30:,.1f} GiB are available"
        )


# Only Linux supports resetting the peak memory. psutil can neither reset nor read it.
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def forget_peak() -> None:
    """Reset the peak memory of this process, if the operating system supports it."""
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text("5")


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes, since the last successful reset or the start of the process."""
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
