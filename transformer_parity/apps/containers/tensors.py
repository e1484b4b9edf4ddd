"""Safetensors files, whole or in shards that an index lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors looks up by name
import numpy as np
from numpy import ndarray
from safetensors import SafetensorError, safe_open

from transformer_parity.apps.containers.folder import MIB, member, read_json
from transformer_spec.files import save_tensors

MOST_HEADER = 4 * MIB  # names, types and shapes: of some 40,000 tensors


def read(path: Path) -> dict[str, ndarray]:
    """Return the tensors of one safetensors file by their names.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is cut, is no safetensors file, or holds a type of number that NumPy does not have.
    """
    with _open(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


def names(path: Path) -> list[str]:
    """Return the names of the tensors of one safetensors file; errors as in ``read``."""
    with _open(path) as file:
        return list(file.keys())


def read_shards(index: Path, read_one: Callable[[Path], dict[str, ndarray]] = read) -> dict[str, ndarray]:
    """Return the tensors of all files that an index lists.

    Args:
        index: A file in JSON, whose ``weight_map`` says in which file beside it each tensor is.
        read_one: Reads one of the files.

    Raises:
        OSError: A file is missing, or cannot be read.
        ValueError: The index lists what is not in its files or leads out of the folder, or its files hold what it does
            not list.
    """
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{index.name} must have an object 'weight_map' with the name of a file for each tensor")
    files = {place: member(index.parent, place) for place in sorted(set(places.values()))}
    found: dict[str, ndarray] = {}
    for place, path in files.items():
        tensors = read_one(path)
        listed = {name for name, where in places.items() if where == place}
        if odd := sorted(listed ^ tensors.keys()):
            where = "lists" if odd[0] in listed else "does not list"
            raise ValueError(f"{index.name} {where} {odd[0]} in {place}, and the file says otherwise")
        found |= tensors
    return found


def shards(index: Path) -> list[Path]:
    """Return the files that an index lists, which is taken to be sound."""
    return [member(index.parent, place) for place in sorted(set(read_json(index)["weight_map"].values()))]


def write(path: Path, tensors: dict[str, ndarray]) -> None:
    """Write a safetensors file as PyTorch's users expect it.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        save_tensors(path, {name: np.ascontiguousarray(array) for name, array in tensors.items()}, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error


@contextmanager
def _open(path: Path) -> Iterator[safe_open]:
    with path.open("rb") as start:  # safetensors calls a file absent that it may not read
        size = int.from_bytes(start.read(8), "little")
    if MOST_HEADER < size <= path.stat().st_size:
        raise ValueError(f"{path.name} is not a usable safetensors file: it names too many tensors, in {size:,} bytes")
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path.name} is not a usable safetensors file: {error}") from error
