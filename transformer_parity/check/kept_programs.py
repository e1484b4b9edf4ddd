"""What JAX compiles, kept on disk for later runs: JAX finds a program by its text, its options and its own version.

What is half-written is compiled anew. TensorFlow can keep programs too, but fails where one of them cannot be read.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SWITCH = "PARITY_CACHE"  # a folder in place of the user's cache; empty: nothing is kept
JAX_SWITCH = "JAX_COMPILATION_CACHE_DIR"
AGE = 30 * 24 * 3600.0  # seconds after which a program is removed


def processor_features() -> str:
    """Return a short name of what the processor can do: a compiled program may not run on another one."""
    features = platform.processor()
    with suppress(OSError):
        if flags := re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            features = flags[0]
    return hashlib.sha256(features.encode()).hexdigest()[:12]


def kept_in(folder: Path) -> dict[str, str]:
    """Return the variables that let JAX keep every program in a folder."""
    return {
        JAX_SWITCH: str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def keep_programs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let JAX keep programs in the user's cache.

    There are none where the environment says otherwise, or where the folder cannot be written or is another user's:
    what is loaded is run.
    """
    cache = environment.get(SWITCH)
    if cache == "" or JAX_SWITCH in environment:
        return {}
    try:
        root = cache or environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root).absolute() / "transformer-parity" / f"jax-{processor_features()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK) or (hasattr(os, "getuid") and folder.stat().st_uid != os.getuid()):
            return {}
        for entry in folder.iterdir():
            if entry.stat().st_mtime < time.time() - AGE:
                entry.unlink()
    except (OSError, RuntimeError):  # the second: no home
        return {}
    return kept_in(folder)
