"""Read and write CTranslate2's ``model.bin``, a little-endian sequence of named variables followed by aliases.

Source: OpenNMT/CTranslate2, python/ctranslate2/specs/model_spec.py and src/models/model.cc.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from numpy import ndarray

from transformer_spec.files import replacing

OLDEST, NEWEST = 4, 6  # supported format versions; earlier versions do not store the dtypes of the variables
DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16, ml_dtypes.bfloat16)


class StoredModel(NamedTuple):
    """The content of a ``model.bin`` file.

    Attributes:
        name: Name of the specification, such as ``TransformerSpec``.
        revision: Revision number of the specification.
        variables: Arrays by name. An alias maps to the same array object as its variable.
    """

    name: str
    revision: int
    variables: dict[str, ndarray]


def read(path: Path) -> StoredModel:
    """Read a ``model.bin`` file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, has an unsupported version, or declares a variable that is larger than the
            rest of the file.
    """
    with path.open("rb") as file:
        try:
            return _read(file, path.stat().st_size)
        except (ValueError, struct.error) as error:
            raise ValueError(f"{path} is not a valid model.bin: {error}") from error


def _read(file: BinaryIO, size: int) -> StoredModel:
    def number(form: str) -> int:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0]

    def text() -> str:
        held = file.read(number("H"))
        if not held.endswith(b"\0"):
            raise ValueError("a name does not end with a null byte")
        return held[:-1].decode()

    if not OLDEST <= (version := number("I")) <= NEWEST:
        raise ValueError(f"expected a format version from {OLDEST} to {NEWEST}, got {version}")
    name, revision = text(), number("I")
    variables: dict[str, ndarray] = {}
    for _ in range(number("I")):
        variable = text()
        shape = tuple(number("I") for _ in range(number("B")))
        if (kind := number("B")) >= len(DTYPES):
            raise ValueError(f"expected a dtype code below {len(DTYPES)} for {variable}, got {kind}")
        dtype, claimed = np.dtype(DTYPES[kind]), number("I")
        if claimed != (needed := math.prod(shape) * dtype.itemsize):
            raise ValueError(
                f"expected {needed:,} bytes for {variable} with shape {list(shape)} and dtype {dtype.name}, "
                f"got {claimed:,}"
            )
        if claimed > size - file.tell():
            raise ValueError(f"{variable} extends beyond the end of the file")
        if variable in variables:
            raise ValueError(f"duplicate name {variable}")
        variables[variable] = np.frombuffer(file.read(claimed), dtype).reshape(shape)
    for _ in range(number("I")):
        alias, of = text(), text()
        if alias in variables:
            raise ValueError(f"duplicate name {alias}")
        if of not in variables:
            raise ValueError(f"the alias {alias} refers to {of}, which does not exist")
        variables[alias] = variables[of]
    if file.tell() != size:
        raise ValueError(f"expected the file to end after the aliases, got {size - file.tell():,} more bytes")
    return StoredModel(name, revision, variables)


def write(path: Path, model: StoredModel) -> None:
    """Write a ``model.bin`` file atomically.

    If multiple names map to the same array object, the array is stored only once, and all names except the first become
    aliases.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If CTranslate2 does not support a variable's dtype or size.
    """

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value.encode()) + 1) + value.encode() + b"\0"

    first: dict[int, str] = {}
    ordered = sorted(model.variables.items())
    for name, array in ordered:
        if array.dtype not in DTYPES or array.nbytes >= 2**32:
            raise ValueError(f"CTranslate2 does not support {name}: got {array.nbytes:,} bytes of {array.dtype.name}")
        first.setdefault(id(array), name)
    own = [(name, array) for name, array in ordered if first[id(array)] == name]
    aliases = [(name, first[id(array)]) for name, array in ordered if first[id(array)] != name]
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<I", NEWEST) + text(model.name) + struct.pack("<II", model.revision, len(own)))
        for name, array in own:
            kind = DTYPES.index(array.dtype.type)
            file.write(text(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape))
            file.write(struct.pack("<BI", kind, array.nbytes) + array.tobytes())
        file.write(struct.pack("<I", len(aliases)))
        for alias, name in aliases:
            file.write(text(alias) + text(name))
