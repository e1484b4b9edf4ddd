"""What XLA compiles, kept on disk for later runs, which find a program by its whole text and never by a name.

JAX keeps programs by text, options and version, and compiles anew what is half-written. TensorFlow compares the text,
but knows no versions, and fails where a program cannot be read: each version has a folder of its own, and only programs
whose digest is known are left there for it to find.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

SWITCH = "PARITY_CACHE"  # a folder in place of the user's cache; empty: nothing is kept
JAX_SWITCH = "JAX_COMPILATION_CACHE_DIR"
TENSORFLOW_SWITCH = "TF_XLA_FLAGS"
TENSORFLOW_FOLDER = "--tf_xla_persistent_cache_directory"  # among those flags
SEAL = ".sha256"  # the digest of a program of TensorFlow, beside it
SPACE = 2**30  # bytes: on a disk with less, TensorFlow might fail to keep a program, and then to run it
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
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # or else places in the source are kept, and read, with each program
    }


def keep_programs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let JAX keep programs in the user's cache.

    There are none where the environment says otherwise, or where the folder cannot be written or is another user's:
    what is loaded is run.
    """
    folder = None if JAX_SWITCH in environment else _folder("jax", environment)
    return {} if folder is None else kept_in(folder)


@contextmanager
def kept_by_tensorflow(environment: Mapping[str, str]) -> Iterator[None]:
    """Let TensorFlow keep programs of the CPU, where it is imported and has run nothing; at the end, seal them.

    From then on, for as long as the process lives, it looks for them in the user's cache.
    """
    import tensorflow as tf

    flags = environment.get(TENSORFLOW_SWITCH, "")
    folder = None
    if TENSORFLOW_FOLDER not in flags:
        version = "\n".join((tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION))
        folder = _folder(f"tf-{hashlib.sha256(version.encode()).hexdigest()[:12]}", environment)
    if folder is None or shutil.disk_usage(folder).free < SPACE:
        yield
        return
    for program in _programs(folder):
        seal = program.with_name(program.name + SEAL)
        with suppress(OSError):  # another process was faster
            if not seal.exists() or seal.read_text() != _digest(program):
                program.unlink()
    os.environ[TENSORFLOW_SWITCH] = f"{flags} {TENSORFLOW_FOLDER}={folder}".strip()
    yield
    for program in _programs(folder):
        seal = program.with_name(program.name + SEAL)
        with suppress(OSError):
            if not seal.exists():
                seal.write_text(_digest(program))


def _programs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pb"))


def _digest(program: Path) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest()


def _folder(name: str, environment: Mapping[str, str]) -> Path | None:
    """Return a folder in the user's cache, without what is old; None where there can or shall be none."""
    cache = environment.get(SWITCH)
    if cache == "":
        return None
    try:
        root = cache or environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root).absolute() / "transformer-parity" / f"{name}-{processor_features()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK) or (hasattr(os, "getuid") and folder.stat().st_uid != os.getuid()):
            return None
        for entry in folder.iterdir():
            if entry.stat().st_mtime < time.time() - AGE:
                entry.unlink()
    except (OSError, RuntimeError):  # the second: no home
        return None
    return folder
