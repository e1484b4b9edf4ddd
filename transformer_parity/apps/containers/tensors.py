"""Read and write safetensors files, including sharded models with an index file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy because safetensors looks up dtypes by name
import numpy as np
from numpy import ndarray
from safetensors import SafetensorError, safe_open

from transformer_parity.apps.containers.directory import MIB, member, read_json
from transformer_spec.files import save_tensors

MOST_HEADER = 4 * MIB  # maximum header size in bytes, enough for about 40,000 tensors


def read(path: Path) -> dict[str, ndarray]:
    """Return a dict with the tensors in one safetensors file, keyed by name.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is truncated, is not a safetensors file, or uses a dtype that NumPy does not support.
    """
    with _open(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


def names(path: Path) -> list[str]:
    """Return the names of the tensors in one safetensors file. This function raises the same errors as ``read``."""
    with _open(path) as file:
        return list(file.keys())


def read_shards(index: Path, read_one: Callable[[Path], dict[str, ndarray]] = read) -> dict[str, ndarray]:
    """Return the tensors in all files that an index lists.

    Args:
        index: JSON file whose ``weight_map`` maps each tensor name to the name of a file in the same directory.
        read_one: Function that reads one of the listed files and returns its tensors by name.

    Raises:
        OSError: If a file is missing or cannot be read.
        ValueError: If the index has no valid ``weight_map`` or refers to a file outside its directory, or if the names
            of the tensors in a file differ from the names that the index lists for the file.
    """
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{index.name} must contain an object 'weight_map' that maps tensor names to file names")
    files = {place: member(index.parent, place) for place in sorted(set(places.values()))}
    found: dict[str, ndarray] = {}
    for place, path in files.items():
        tensors = read_one(path)
        listed = {name for name, where in places.items() if where == place}
        if odd := sorted(listed ^ tensors.keys()):
            if odd[0] in listed:
                raise ValueError(f"{place} does not contain {odd[0]}, which {index.name} lists")
            raise ValueError(f"{index.name} does not list {odd[0]}, which {place} contains")
        found |= tensors
    return found


def shards(index: Path) -> list[Path]:
    """Return the paths of the files that an index lists. The caller must check the index with ``read_shards`` first."""
    return [member(index.parent, place) for place in sorted(set(read_json(index)["weight_map"].values()))]


def write(path: Path, tensors: dict[str, ndarray]) -> None:
    """Write a safetensors file with the metadata that marks it as a PyTorch file.

    Raises:
        OSError: If the file cannot be written.
    """
    try:
        save_tensors(path, {name: np.ascontiguousarray(array) for name, array in tensors.items()}, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error


@contextmanager
def _open(path: Path) -> Iterator[safe_open]:
    # If the file is unreadable, Path.open raises the actual error, whereas safetensors reports the file as missing.
    with path.open("rb") as start:
        size = int.from_bytes(start.read(8), "little")
    if MOST_HEADER < size <= path.stat().st_size:
        raise ValueError(
            f"{path.name} is not a valid safetensors file: expected a header of at most {MOST_HEADER:,} bytes, "
            f"got {size:,}"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path.name} is not a valid safetensors file: {error}") from error
