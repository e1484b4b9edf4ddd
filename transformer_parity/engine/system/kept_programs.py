"""A cache on disk that stores the programs that XLA has compiled, so that later runs can load them.

JAX and TensorFlow look up a program by its full text, never by a name. JAX also includes the compiler options and the
JAX version in the key, and it recompiles a program if the file is incomplete. TensorFlow doesn't include its version in
the key, and it raises an error if it can't read a program. Therefore, each TensorFlow version uses a separate
directory, and programs whose checksum doesn't match are deleted.
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

SWITCH = "PARITY_CACHE"  # environment variable that sets the cache directory; empty disables the cache
JAX_SWITCH = "JAX_COMPILATION_CACHE_DIR"
TENSORFLOW_SWITCH = "TF_XLA_FLAGS"
TENSORFLOW_DIRECTORY = "--tf_xla_persistent_cache_directory"  # flag in TF_XLA_FLAGS
SEAL = ".sha256"  # suffix of the file with a program's checksum
SPACE = 2**30  # minimum free disk space in bytes; TensorFlow can't run a program that it can't save
AGE = 30 * 24 * 3600.0  # time in seconds after which a compiled program is deleted from the cache


def processor_features() -> str:
    """Return a hash of the processor's features, because a compiled program may not run on a different processor."""
    features = platform.processor()
    with suppress(OSError):
        if flags := re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            features = flags[0]
    return hashlib.sha256(features.encode()).hexdigest()[:12]


def kept_in(directory: Path) -> dict[str, str]:
    """Return the environment variables that make JAX cache every program in a directory."""
    return {
        JAX_SWITCH: str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # omit source locations, which would be part of each program's text
    }


def keep_programs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make JAX cache programs in the user's cache directory.

    The result is empty if the environment already configures a cache, or if the directory isn't writable or belongs to
    a different user. Using another user's cache would be unsafe, because its programs are executed.
    """
    directory = None if JAX_SWITCH in environment else _directory("jax", environment)
    return {} if directory is None else kept_in(directory)


@contextmanager
def kept_by_tensorflow(environment: Mapping[str, str]) -> Iterator[None]:
    """Make TensorFlow cache its CPU programs within a ``with`` block, and write their checksums at the end.

    Enter this context after importing TensorFlow and before running any TensorFlow operation. The process continues to
    use the cache after the block.
    """
    import tensorflow as tf

    flags = environment.get(TENSORFLOW_SWITCH, "")
    directory = None
    if TENSORFLOW_DIRECTORY not in flags:
        version = "\n".join((tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION))
        directory = _directory(f"tf-{hashlib.sha256(version.encode()).hexdigest()[:12]}", environment)
    if directory is None or shutil.disk_usage(directory).free < SPACE:
        yield
        return
    for program in _programs(directory):
        seal = program.with_name(program.name + SEAL)
        with suppress(OSError):  # a concurrent process may have deleted the file first
            if not seal.exists() or seal.read_text() != _digest(program):
                program.unlink()
    os.environ[TENSORFLOW_SWITCH] = f"{flags} {TENSORFLOW_DIRECTORY}={directory}".strip()
    yield
    for program in _programs(directory):
        seal = program.with_name(program.name + SEAL)
        with suppress(OSError):
            if not seal.exists():
                seal.write_text(_digest(program))


def _programs(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.pb"))


def _digest(program: Path) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest()


def _directory(name: str, environment: Mapping[str, str]) -> Path | None:
    """Return a directory in the user's cache after deleting old files, or None if the cache is disabled or unusable."""
    cache = environment.get(SWITCH)
    if cache == "":
        return None
    try:
        root = cache or environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(root).absolute() / "transformer-parity" / f"{name}-{processor_features()}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK) or (hasattr(os, "getuid") and directory.stat().st_uid != os.getuid()):
            return None
        for entry in directory.iterdir():
            if entry.stat().st_mtime < time.time() - AGE:
                entry.unlink()
    except (OSError, RuntimeError):  # Path.home() raises RuntimeError if there is no home directory
        return None
    return directory
