"""NumPy's ``.npz``: a zip of arrays. No object arrays, and no more memory than the size of the file can stand for."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy import ndarray

from transformer_spec.files import replacing

LARGEST_RATIO = 32  # of what is inside to the size of the file: weights shrink to a half at best, a zip bomb to 1/1000
MOST_MEMBERS = 10_000
SMALL = 2**20  # bytes inside that are always allowed
KINDS = "fiub"  # floating-point numbers, integers and booleans
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read(path: str | Path) -> dict[str, ndarray]:
    """Read every array of a ``.npz``, by its name.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, holds something other than numbers, or claims more than it can hold.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            check_members(members, Path(path).stat().st_size)
            return {member.filename.removesuffix(".npy"): _read_array(archive, member) for member in members}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is not a usable .npz file: {error}") from error


def check_members(members: list[zipfile.ZipInfo], file_size: int) -> None:
    """Refuse the members of a zip before any is read: other compressions, names that come twice, a zip bomb.

    Raises:
        ValueError: One of these was found.
    """
    if len(members) > MOST_MEMBERS:
        raise ValueError(f"it may hold {MOST_MEMBERS:,} members: got {len(members):,}")
    for member in members:
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & 1:
            raise ValueError(f"{member.filename} must be stored or deflated, and not encrypted")
    if len({member.filename for member in members}) < len(members):
        raise ValueError("it holds several members of one name")
    size, largest = sum(member.file_size for member in members), max(SMALL, LARGEST_RATIO * file_size)
    if size > largest:
        raise ValueError(f"its members must unpack to at most {largest:,} bytes: got {size:,}")


def write(path: str | Path, arrays: Mapping[str, ndarray]) -> None:
    """Write arrays to a ``.npz``, uncompressed and atomically: whatever fails, an old file stays whole.

    Sizes stand in the local headers and rows lie behind each other, as Marian's reader (cnpy) needs: ``numpy.savez``
    writes zip64 instead.

    Raises:
        OSError: The file cannot be written.
        ValueError: An array holds something other than numbers.
    """
    with replacing(Path(path)) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            if array.dtype.kind not in KINDS:
                raise ValueError(f"{name} must hold numbers: got {array.dtype}")
            data = io.BytesIO()
            np.lib.format.write_array(data, np.asarray(array, order="C"), (1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), data.getbuffer())


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> ndarray:
    with archive.open(member) as stream:
        shape, is_fortran, dtype = _read_header(stream, member.filename)
        size = math.prod(shape) * dtype.itemsize
        held = member.file_size - stream.tell()
        if size != held:
            raise ValueError(f"{member.filename} claims {size:,} bytes {dtype.name} {list(shape)}: it holds {held:,}")
        data = stream.read(size)  # checked against the checksum of the member
    if len(data) != size:
        raise ValueError(f"{member.filename} is cut off")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")


def _read_header(stream: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(stream)
        shape, is_fortran, dtype = HEADERS[version](stream)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{name} has no header of .npy version 1 or 2: {error}") from error
    if dtype.kind not in KINDS:
        raise ValueError(f"{name} must hold numbers: got {dtype}")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} must have no negative size: got {list(shape)}")
    return shape, is_fortran, dtype
