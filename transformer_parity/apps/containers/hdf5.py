"""A reader for HDF5 files that supports only uncompressed datasets stored in the file itself. Requires h5py.

The reader rejects links, external storage, and compression.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy import ndarray

DEEPEST = 32  # maximum nesting depth of groups


def read(path: str | Path, content: bytes | None = None) -> dict[str, ndarray]:
    """Return all datasets in an HDF5 file as a dict from paths within the file to arrays. All datasets must be numeric.

    Args:
        path: File to read. If ``content`` is specified, ``path`` is used only in error messages.
        content: Content of the file, if the file is a member of an archive. If None, the file is read from ``path``.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, refers to other files, or declares datasets that are larger than the file.
    """
    size = Path(path).stat().st_size if content is None else len(content)
    arrays: dict[str, ndarray] = {}
    try:
        with h5py.File(path if content is None else io.BytesIO(content), "r") as file:
            datasets: dict[str, Any] = {}
            _collect(file, "", datasets, set())
            claimed = sum(dataset.nbytes for dataset in datasets.values())
            if claimed > size:
                raise ValueError(f"the datasets have {claimed:,} bytes, but the file has only {size:,}")
            for name, dataset in datasets.items():
                arrays[name] = np.asarray(dataset[()])
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a valid HDF5 file: {error}") from error
    return arrays


def _collect(group: h5py.Group, prefix: str, found: dict[str, Any], seen: set[int]) -> None:
    """Check the datasets in a group and its subgroups, and add them to ``found`` without reading their content."""
    address = h5py.h5o.get_info(group.id).addr
    if address in seen:
        raise ValueError(f"the group {prefix} has more than one path")
    seen.add(address)
    if prefix.count("/") > DEEPEST:
        raise ValueError(f"expected groups nested at most {DEEPEST} levels deep, got {prefix}")
    for name in group:
        path = f"{prefix}{name}"
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{path} is a link ({type(link).__name__}), which is not supported")
        entry = group[name]
        if isinstance(entry, h5py.Group):
            _collect(entry, f"{path}/", found, seen)
        elif isinstance(entry, h5py.Dataset):
            _check(path, entry)
            found[path] = entry
        else:
            raise ValueError(f"expected {path} to be a group or a dataset, got {type(entry).__name__}")


def _check(path: str, dataset: h5py.Dataset) -> None:
    if dataset.dtype.kind not in "fiub":
        raise ValueError(f"expected {path} to contain numbers, got {dataset.dtype}")
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{path} uses external or virtual storage, which is not supported")
    if dataset.chunks is not None:
        raise ValueError(f"{path} has a chunked layout, which is not supported because chunks can be compressed")
    if (held := dataset.id.get_storage_size()) != dataset.nbytes:
        raise ValueError(f"expected {dataset.nbytes:,} bytes for {path} with shape {list(dataset.shape)}, got {held:,}")
