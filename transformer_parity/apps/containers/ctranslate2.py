"""CTranslate2's ``model.bin``: named variables one after another, then aliases. Little-endian, and plain data.

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

OLDEST, NEWEST = 4, 6  # versions of the layout; before them, a variable had no dtype of its own
DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16, ml_dtypes.bfloat16)


class StoredModel(NamedTuple):
    """What a file holds: the name and the revision of its specification, and variables; an alias is the same array."""

    name: str
    revision: int
    variables: dict[str, ndarray]


def read(path: Path) -> StoredModel:
    """Read a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, of another version, or claims more than it holds.
    """
    with path.open("rb") as file:
        try:
            return _read(file, path.stat().st_size)
        except (ValueError, struct.error) as error:
            raise ValueError(f"{path} is not a usable model.bin: {error}") from error


def _read(file: BinaryIO, size: int) -> StoredModel:
    def number(form: str) -> int:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0]

    def text() -> str:
        held = file.read(number("H"))
        if not held.endswith(b"\0"):
            raise ValueError("it has a name that does not end with a zero")
        return held[:-1].decode()

    if not OLDEST <= (version := number("I")) <= NEWEST:
        raise ValueError(f"its version must be from {OLDEST} to {NEWEST}: got {version}")
    name, revision = text(), number("I")
    variables: dict[str, ndarray] = {}
    for _ in range(number("I")):
        variable = text()
        shape = tuple(number("I") for _ in range(number("B")))
        if (kind := number("B")) >= len(DTYPES):
            raise ValueError(f"{variable} is of type {kind}, which is not known")
        dtype, claimed = np.dtype(DTYPES[kind]), number("I")
        if claimed != math.prod(shape) * dtype.itemsize or claimed > size - file.tell():
            raise ValueError(f"{variable} claims {claimed:,} bytes, {list(shape)} of {dtype.name}")
        if variable in variables:
            raise ValueError(f"it holds {variable} twice")
        variables[variable] = np.frombuffer(file.read(claimed), dtype).reshape(shape)
    for _ in range(number("I")):
        alias, of = text(), text()
        if alias in variables or of not in variables:
            raise ValueError(f"its alias {alias} must be new, and of a variable: got {of}")
        variables[alias] = variables[of]
    if file.tell() != size:
        raise ValueError(f"it has {size - file.tell():,} bytes behind its end")
    return StoredModel(name, revision, variables)


def write(path: Path, model: StoredModel) -> None:
    """Write a file, atomically; an array that is the same as one before it becomes an alias.

    Raises:
        OSError: The file cannot be written.
        ValueError: A variable is of a type that CTranslate2 does not have, or larger than it can say.
    """

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value.encode()) + 1) + value.encode() + b"\0"

    first: dict[int, str] = {}
    ordered = sorted(model.variables.items())
    for name, array in ordered:
        if array.dtype not in DTYPES or array.nbytes >= 2**32:
            raise ValueError(f"{name} cannot be written for CTranslate2: {array.nbytes:,} bytes of {array.dtype.name}")
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
