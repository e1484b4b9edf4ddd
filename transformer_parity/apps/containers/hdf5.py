"""HDF5 as data that lies in the one file: no links, no storage elsewhere, nothing compressed. Needs h5py."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy import ndarray

DEEPEST = 32  # groups in groups


def read(path: str | Path, content: bytes | None = None) -> dict[str, ndarray]:
    """Read every dataset of numbers of an HDF5 file, by its path.

    Args:
        path: The file.
        content: Its bytes, where it lies in an archive; the path then only names it in messages.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, leads out of itself, or claims more than it holds.
    """
    size = Path(path).stat().st_size if content is None else len(content)
    arrays: dict[str, ndarray] = {}
    try:
        with h5py.File(path if content is None else io.BytesIO(content), "r") as file:
            datasets: dict[str, Any] = {}
            _collect(file, "", datasets, set())
            claimed = sum(dataset.nbytes for dataset in datasets.values())
            if claimed > size:
                raise ValueError(f"its datasets claim {claimed:,} bytes: the file has {size:,}")
            for name, dataset in datasets.items():
                arrays[name] = np.asarray(dataset[()])
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a usable HDF5 file: {error}") from error
    return arrays


def _collect(group: h5py.Group, prefix: str, found: dict[str, Any], seen: set[int]) -> None:
    """Add the datasets of a group and of those inside it, each checked and none read."""
    address = h5py.h5o.get_info(group.id).addr
    if address in seen:
        raise ValueError(f"{prefix} is a group that has two names")
    seen.add(address)
    if prefix.count("/") > DEEPEST:
        raise ValueError(f"{prefix} lies more than {DEEPEST} groups deep")
    for name in group:
        path = f"{prefix}{name}"
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{path} is a link: {type(link).__name__}")
        entry = group[name]
        if isinstance(entry, h5py.Group):
            _collect(entry, f"{path}/", found, seen)
        elif isinstance(entry, h5py.Dataset):
            _check(path, entry)
            found[path] = entry
        else:
            raise ValueError(f"{path} is neither a group nor a dataset")


def _check(path: str, dataset: h5py.Dataset) -> None:
    if dataset.dtype.kind not in "fiub":
        raise ValueError(f"{path} must hold numbers: got {dataset.dtype}")
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{path} is stored in another file")
    if dataset.chunks is not None:
        raise ValueError(f"{path} must be stored in one piece: got chunks, which may be compressed")
    if (held := dataset.id.get_storage_size()) != dataset.nbytes:
        raise ValueError(f"{path} claims {dataset.nbytes:,} bytes, {list(dataset.shape)}: it holds {held:,}")
