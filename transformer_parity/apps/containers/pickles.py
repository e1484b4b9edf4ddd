"""Files that ``torch.save`` wrote, read without torch: nothing that a pickle names is called but what stands here.

A file is a zip archive whose member ``data.pkl`` is a pickle, with the numbers in members beside it; or, before
PyTorch 1.6, five pickles one after another, with the numbers behind them. Each pickle is read twice: first its
instructions alone, of which few are allowed, then what they build.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import reprlib
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from numpy import ndarray

MOST_PICKLED = 32 * 2**20  # bytes of a pickle; the numbers lie outside it
MOST_MEMBERS = 100_000
DEEPEST = 100  # tuples in tuples
MOST_IN_TUPLES = 10**7  # values, each as often as it is reached: a key of a dictionary is gone through whole
REPEATS = 8  # how often the names of tied tensors may repeat the bytes of a file
LEGACY_START = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
LEGACY_VERSION = 1001
NAMESPACE = {"argparse.Namespace": SimpleNamespace}  # for files that hold the options of a command line

DTYPES: dict[str, Any] = {
    "Double": np.float64,
    "Float": np.float32,
    "Half": np.float16,
    "BFloat16": ml_dtypes.bfloat16,
    "Long": np.int64,
    "Int": np.int32,
    "Short": np.int16,
    "Char": np.int8,
    "Byte": np.uint8,
    "Bool": np.bool_,
}
# What plain values, containers and tensors are built by. Not here: what names a class by an extension's number, calls
# one in an old way, or refers to a persistent object by text.
PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
INSTRUCTIONS = {
    *PUTS,
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "GET", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE"),
    *("NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"),
    *("SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "EMPTY_LIST"),
    *("APPEND", "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT"),
    *("SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
}


class Storage(NamedTuple):
    """Numbers in a row in a file: of which type, how many, and from which byte on."""

    path: Path
    dtype: Any
    length: int
    start: int


class Tensor(NamedTuple):
    """A tensor of a file, whose numbers are not read yet. Strides and offset are counted in numbers, not in bytes."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * np.dtype(self.storage.dtype).itemsize

    def read(self) -> ndarray:
        """Return the numbers.

        Raises:
            OSError: The file cannot be read.
        """
        path, dtype, _, start = self.storage
        width = np.dtype(dtype).itemsize
        count = _span(self.shape, self.strides)
        numbers = np.fromfile(path, dtype, count, offset=start + self.offset * width)
        if len(numbers) != count:
            raise OSError(f"{path} has been cut while it was read")
        strides = [step * width for step in self.strides]
        return np.lib.stride_tricks.as_strided(numbers, self.shape, strides, writeable=False)


Names = Mapping[str, Callable[..., Any]]
Numbers = Callable[[Any, str, int], Storage]  # of a dtype, a key and a count


class _StorageType(NamedTuple):
    dtype: Any


def read(path: Path, also: Names | None = None) -> Any:
    """Return what a file holds, each tensor as a ``Tensor``.

    Args:
        path: A file that ``torch.save`` wrote.
        also: What else a pickle may name, such as ``NAMESPACE``, and what is called in its place.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, was not written by ``torch.save``, or names anything else.
    """
    also = also or {}
    try:
        with path.open("rb") as file:
            if file.read(len(LEGACY_START)) == LEGACY_START:
                return _read_legacy(path, file, also)
            return _read_zip(path, file, also)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path.name} is not a file that torch.save wrote: {error}") from error


def read_tensors(path: Path) -> dict[str, ndarray]:
    """Return the tensors of a file that holds nothing but tensors by their names: a state dict.

    Raises:
        OSError: The file cannot be read.
        ValueError: As in ``read``; or it holds something else.
    """
    return arrays(read(path), path.name)


def arrays(state: Any, what: str) -> dict[str, ndarray]:
    """Return the arrays of tensors by their names; tensors that are one in the file are one array.

    Raises:
        OSError: The file cannot be read.
        ValueError: This is no such thing, or its tensors repeat the bytes of the file too often.
    """
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"{what} must hold tensors by their names: got {type(state).__name__}")
    if odd := [name for name, tensor in state.items() if not isinstance(tensor, Tensor)]:
        raise ValueError(f"{what} must hold tensors by their names: {odd[0]} is {type(state[odd[0]]).__name__}")
    most = REPEATS * sum(
        {tensor.storage.path: tensor.storage.path.stat().st_size for tensor in state.values()}.values()
    )
    if (total := sum(tensor.size for tensor in state.values())) > most:
        raise ValueError(f"the tensors of {what} repeat its numbers: {total:,} bytes, and at most {most:,} are allowed")
    found = {tensor: tensor.read() for tensor in set(state.values())}
    return {name: found[tensor] for name, tensor in state.items()}


def plain(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the settings of a file, each list or other object as a short text.

    A short pickle can hold a list twice in the next, and that one twice again: what is said about it has no end.
    """
    values = {key if isinstance(key, str) else reprlib.repr(key): value for key, value in settings.items()}
    return {
        key: value if not value or isinstance(value, bool | int | float | str) else reprlib.repr(value)
        for key, value in values.items()
    }


def _read_zip(path: Path, file: BinaryIO, also: Names) -> Any:
    """Read an archive: ``NAME/data.pkl``, and the numbers in ``NAME/data/KEY``."""
    with zipfile.ZipFile(file) as archive:
        members = {one.filename: one for one in archive.infolist()}
        if len(members) != len(archive.infolist()) or len(members) > MOST_MEMBERS:
            raise ValueError(f"{path.name} has members of the same name, or more than {MOST_MEMBERS:,}")
        pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{path.name} is not a file that torch.save wrote: it must have one member NAME/data.pkl")
        folder = pickles[0].partition("/")[0]
        if any(name.startswith(f"{folder}/code/") for name in members):
            raise ValueError(f"{path.name} is a TorchScript program: save its state_dict() with torch.save")

        def start(name: str) -> int:
            return _start(file, members[name], path)

        def content(name: str, most: int) -> bytes:
            if (size := members[name].file_size) > most:
                raise ValueError(f"{name} in {path.name} may have {most:,} bytes: got {size:,}")
            file.seek(start(name))
            return file.read(size)

        def numbers(dtype: Any, key: str, count: int) -> Storage:
            if (name := f"{folder}/data/{key}") not in members:
                raise ValueError(f"there is no member {name}")
            needed, size = count * np.dtype(dtype).itemsize, members[name].file_size
            if needed > size:
                raise ValueError(f"{name} is cut: it must have {needed:,} bytes: got {size:,}")
            return Storage(path, dtype, count, start(name))

        if (order := f"{folder}/byteorder") in members and content(order, 16) != b"little":
            raise ValueError(f"{path.name} was not written on a little-endian machine")
        pickled = content(pickles[0], MOST_PICKLED)
        _end(pickled, path)
        return _unpickled(pickled, path, numbers, also)


def _start(file: BinaryIO, member: zipfile.ZipInfo, path: Path) -> int:
    """Return the byte from which on a member of an archive lies in the file, as it is."""
    name = member.filename
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size or member.flag_bits & 1:
        raise ValueError(f"{name} in {path.name} is compressed, which torch.save never does")
    file.seek(member.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\3\4":
        raise ValueError(f"{name} in {path.name} is not where the archive says it is")
    begin = member.header_offset + 30 + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    if begin + member.file_size > path.stat().st_size:
        raise ValueError(f"{path.name} is cut: {name} ends behind its end")
    return begin


def _read_legacy(path: Path, file: BinaryIO, also: Names) -> Any:
    """Read five pickles (magic number, version, machine, object, keys); then each storage, its length in front."""
    file.seek(0)
    content, ends = file.read(MOST_PICKLED), [0]
    for _ in range(5):
        ends.append(ends[-1] + _end(content[ends[-1] :], path))
    parts = [content[begin:end] for begin, end in pairwise(ends)]
    promised: dict[str, tuple[Any, int]] = {}

    def promise(dtype: Any, key: str, count: int) -> Storage:
        if promised.setdefault(key, (dtype, count)) != (dtype, count):
            raise ValueError(f"it describes its storage {key} in two ways")
        return Storage(path, dtype, count, 0)

    version, machine, _, keys = (_unpickled(part, path, promise, also) for part in parts[1:])
    if version != LEGACY_VERSION or not (isinstance(machine, dict) and machine.get("little_endian") is True):
        raise ValueError(f"{path.name} was written by another version of torch.save, or on a big-endian machine")
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(promised):
        raise ValueError(f"{path.name} does not list the storages that its tensors have")
    begin, size, places = ends[-1], path.stat().st_size, {}
    for key in keys:
        dtype, count = promised[key]
        file.seek(begin)
        if int.from_bytes(file.read(8), "little") != count:
            raise ValueError(f"{path.name} is damaged: its storage {key} must have {count:,} numbers")
        places[key] = begin + 8
        begin += 8 + count * np.dtype(dtype).itemsize
        if begin > size:
            raise ValueError(f"{path.name} is cut: its storage {key} ends behind its end")
    return _unpickled(parts[3], path, lambda dtype, key, count: Storage(path, dtype, count, places[key]), also)


def _end(content: bytes, path: Path) -> int:
    """Return the length in bytes of the pickle in front, and refuse one that does more than build values and tensors.

    Tuples in tuples are counted, because Python's own code descends into them without a limit; and so is what they
    hold, because a short pickle can say the same tuple twice in the next, and that one twice again.
    """
    puts = spent = 0
    marks: list[int] = []
    stack: list[tuple[int, int]] = []  # how deep the tuples of each object are, and how many values they hold
    memo: dict[int, tuple[int, int]] = {}
    try:
        for instruction, argument, at in pickletools.genops(content):
            name, needs, leaves = instruction.name, instruction.stack_before, instruction.stack_after
            given: Any = argument
            if name not in INSTRUCTIONS:
                raise ValueError(f"its pickle has the instruction {name}")
            if name in PUTS:
                puts, place = puts + 1, len(memo) if name == "MEMOIZE" else given
                if place > puts + 256:  # room that would be taken for nothing
                    raise ValueError(f"its pickle numbers what it remembers up to {place:,}")
                memo[place] = stack[-1]
            elif name == "MARK":
                marks.append(len(stack))
            elif "GET" in name:
                stack.append(memo[given])
                spent += stack[-1][1]
            else:
                behind = len(needs)
                if pickletools.markobject in needs:
                    behind = len(stack) - marks.pop() + needs.index(pickletools.markobject)
                below = len(stack) - behind
                taken = stack[below:]
                depth, held = max((one[0] for one in taken), default=0), 0
                if "TUPLE" in name:
                    depth, held = depth + 1, sum(1 + one[1] for one in taken)
                    spent += held
                del stack[below:]
                stack += [(depth, held)] * len(leaves)
                if below < 0 or depth > DEEPEST:
                    raise ValueError(f"its pickle takes what is not there, or has over {DEEPEST} tuples in each other")
            if spent > MOST_IN_TUPLES:
                raise ValueError(f"the tuples of its pickle hold more than {MOST_IN_TUPLES:,} values")
            if name == "STOP":
                return int(at or 0) + 1
    except (ValueError, LookupError) as error:
        raise ValueError(f"{path.name} is not a usable file of torch.save: {error}") from error
    raise ValueError(f"{path.name} is not a usable file of torch.save: its pickle does not end")


def _unpickled(content: bytes, path: Path, numbers: Numbers, also: Names) -> Any:
    """Return what a pickle builds whose instructions have been looked at."""

    def tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
        sizes = (offset, *shape, *strides)
        sound = isinstance(storage, Storage) and isinstance(shape, tuple) and isinstance(strides, tuple)
        if not sound or len(shape) != len(strides) or any(type(one) is not int or one < 0 for one in sizes):
            raise ValueError("it describes a tensor that torch.save does not write")
        if offset + _span(shape, strides) > storage.length or math.prod(shape) > storage.length:
            raise ValueError(f"a tensor of shape {list(shape)} does not lie within its {storage.length:,} numbers")
        return Tensor(storage, offset, shape, strides)

    known: dict[str, Any] = {  # made anew for each pickle, which may change what it names
        "collections.OrderedDict": OrderedDict,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        **{f"torch.{name}Storage": _StorageType(dtype) for name, dtype in DTYPES.items()},
        **also,
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in known:
                raise ValueError(f"its pickle names {module}.{name}, and no code is run: save model.state_dict() alone")
            return known[f"{module}.{name}"]

        def persistent_load(self, pid: Any) -> Storage:
            kind, dtype, key, _, count, *view = pid
            if kind != "storage" or type(dtype) is not _StorageType or type(key) is not str or view not in ([], [None]):
                raise ValueError("it describes a storage that torch.save does not write")
            if type(count) is not int or count < 0:
                raise ValueError("a storage must have a number of numbers")
            return numbers(dtype.dtype, key, count)

    wrong = (pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, EOFError, OverflowError)
    try:
        return Unpickler(io.BytesIO(content), encoding="utf-8").load()
    except wrong as error:
        raise ValueError(f"{path.name} is not a usable file of torch.save: {error}") from error


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many numbers lie from the first to the last of a tensor."""
    if not math.prod(shape):
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
