"""A reader and a writer for NumPy's ``.npz`` files, which are ZIP archives of arrays.

The reader rejects object arrays and archives whose unpacked size is far larger than the file.
"""

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

# Maximum ratio of the unpacked size to the file size. This ratio is at most about 2 for weights, but about 1,000 for a
# zip bomb.
LARGEST_RATIO = 32
MOST_MEMBERS = 10_000
SMALL = 2**20  # unpacked size in bytes up to which LARGEST_RATIO does not apply
KINDS = "fiub"  # supported kinds of dtypes: floating-point numbers, integers, and booleans
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read(path: str | Path) -> dict[str, ndarray]:
    """Return a dict with all arrays in a ``.npz`` file, keyed by name.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, contains arrays that are not numeric, or requires too much memory when
            unpacked.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            check_members(members, Path(path).stat().st_size)
            return {member.filename.removesuffix(".npy"): _read_array(archive, member) for member in members}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is not a valid .npz file: {error}") from error


def check_members(members: list[zipfile.ZipInfo], file_size: int) -> None:
    """Check the members of a ZIP archive before reading them.

    Raises:
        ValueError: If the archive has too many members or two members with the same name, if a member is encrypted or
            uses an unsupported compression method, or if the unpacked size is too large.
    """
    if len(members) > MOST_MEMBERS:
        raise ValueError(f"expected at most {MOST_MEMBERS:,} members, got {len(members):,}")
    for member in members:
        if member.flag_bits & 1:
            raise ValueError(f"{member.filename} is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"expected {member.filename} to be uncompressed or to use Deflate compression, "
                f"got compression method {member.compress_type}"
            )
    if len({member.filename for member in members}) < len(members):
        raise ValueError("multiple members have the same name")
    size, largest = sum(member.file_size for member in members), max(SMALL, LARGEST_RATIO * file_size)
    if size > largest:
        raise ValueError(f"expected at most {largest:,} bytes of unpacked data, got {size:,}")


def write(path: str | Path, arrays: Mapping[str, ndarray]) -> None:
    """Write arrays to an uncompressed ``.npz`` file. The write is atomic: an error leaves an existing file unchanged.

    The function does not use ``numpy.savez``, because Marian's reader (cnpy) does not support the ZIP64 headers that
    ``numpy.savez`` writes. The reader also requires that the local ZIP headers contain the sizes of the members, and
    that the arrays are in C order.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If an array is not numeric.
    """
    with replacing(Path(path)) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            if array.dtype.kind not in KINDS:
                raise ValueError(f"{name} must contain numbers: got {array.dtype}")
            data = io.BytesIO()
            np.lib.format.write_array(data, np.asarray(array, order="C"), (1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), data.getbuffer())


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> ndarray:
    with archive.open(member) as stream:
        shape, is_fortran, dtype = _read_header(stream, member.filename)
        size = math.prod(shape) * dtype.itemsize
        held = member.file_size - stream.tell()
        if size != held:
            raise ValueError(
                f"expected {size:,} bytes in {member.filename} for {dtype.name} {list(shape)}, got {held:,} bytes"
            )
        data = stream.read(size)  # raises an error if the member's checksum is wrong
    if len(data) != size:
        raise ValueError(f"{member.filename} is truncated (expected {size:,} bytes, got {len(data):,})")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")


def _read_header(stream: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(stream)
        shape, is_fortran, dtype = HEADERS[version](stream)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{name} must have a .npy header of version 1 or 2: {error}") from error
    if dtype.kind not in KINDS:
        raise ValueError(f"expected {name} to contain numbers, got {dtype}")
    if min(shape, default=0) < 0:
        raise ValueError(f"expected nonnegative sizes in the shape of {name}, got {list(shape)}")
    return shape, is_fortran, dtype
