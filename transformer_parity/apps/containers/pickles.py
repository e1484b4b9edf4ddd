"""A reader for ``torch.save`` files that does not require PyTorch and calls only functions defined in this module.

Since PyTorch 1.6, ``torch.save`` writes a ZIP archive. The member ``data.pkl`` is a pickle, and other members contain
the tensor data. Earlier versions wrote five consecutive pickles followed by the tensor data. The reader reads each
pickle twice. The first pass checks that the pickle contains only allowed opcodes, and the second pass builds the
objects.
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

MOST_PICKLED = 32 * 2**20  # maximum size of a pickle in bytes, excluding the tensor data
MOST_MEMBERS = 100_000
DEEPEST = 100  # maximum nesting depth of tuples
# Maximum total number of values in tuples. If a tuple refers to the same value twice, the value is counted twice,
# because hashing the tuple visits the value twice.
MOST_IN_TUPLES = 10**7
REPEATS = 8  # maximum ratio of the total tensor size to the file size; exceeds 1 if tensors share storage
LEGACY_START = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
LEGACY_VERSION = 1001
NAMESPACE = {"argparse.Namespace": SimpleNamespace}  # for files that contain parsed command-line options

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
# Opcodes that build simple values, containers, and tensors. The list excludes opcodes that refer to a class by an
# extension code, create an instance of an old-style class, or refer to a persistent object by a text ID.
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
    """A contiguous block of numbers in a file.

    Attributes:
        path: File that contains the numbers.
        dtype: Dtype of the numbers.
        length: Number of elements.
        start: Offset of the first element in the file, in bytes.
    """

    path: Path
    dtype: Any
    length: int
    start: int


class Tensor(NamedTuple):
    """A tensor whose data has not been read yet. The offset and the strides are in elements, not in bytes."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * np.dtype(self.storage.dtype).itemsize

    def read(self) -> ndarray:
        """Read the tensor's data from the file, and return it as an array.

        Raises:
            OSError: If the file cannot be read.
        """
        path, dtype, _, start = self.storage
        width = np.dtype(dtype).itemsize
        count = _span(self.shape, self.strides)
        numbers = np.fromfile(path, dtype, count, offset=start + self.offset * width)
        if len(numbers) != count:
            raise OSError(f"{path} was truncated while it was being read")
        strides = [step * width for step in self.strides]
        return np.lib.stride_tricks.as_strided(numbers, self.shape, strides, writeable=False)


Names = Mapping[str, Callable[..., Any]]
Numbers = Callable[[Any, str, int], Storage]  # (dtype, key, number of elements) -> storage


class _StorageType(NamedTuple):
    dtype: Any


def read(path: Path, also: Names | None = None) -> Any:
    """Return the object stored in a file. Tensors in the object are represented by ``Tensor`` objects.

    Args:
        path: File that was written by ``torch.save``.
        also: Names of additional classes and functions that a pickle may refer to, each with the object that replaces
            the class or function. An example is ``NAMESPACE``.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, was not written by ``torch.save``, or refers to a class or function that is
            not allowed.
    """
    also = also or {}
    try:
        with path.open("rb") as file:
            if file.read(len(LEGACY_START)) == LEGACY_START:
                return _read_legacy(path, file, also)
            return _read_zip(path, file, also)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path.name} was not written by torch.save: {error}") from error


def read_tensors(path: Path) -> dict[str, ndarray]:
    """Return the tensors in a file that contains a state dict.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, was not written by ``torch.save``, refers to a class or function that is not
            allowed, or does not contain a state dict.
    """
    return arrays(read(path), path.name)


def arrays(state: Any, what: str) -> dict[str, ndarray]:
    """Read the tensors in a state dict, and return a dict from their names to arrays.

    If two names refer to the same part of a storage with the same shape and strides, they map to the same array object.

    Args:
        state: State dict with ``Tensor`` values.
        what: Name of the state dict, for error messages.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If ``state`` is not a state dict, or if the total size of its tensors exceeds ``REPEATS`` times the
            file size because too many tensors share storage.
    """
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"{what} must be a state dict: got {type(state).__name__}")
    if odd := [name for name, tensor in state.items() if not isinstance(tensor, Tensor)]:
        raise ValueError(f"{what} must contain only tensors: got {type(state[odd[0]]).__name__} for {odd[0]}")
    most = REPEATS * sum(
        {tensor.storage.path: tensor.storage.path.stat().st_size for tensor in state.values()}.values()
    )
    if (total := sum(tensor.size for tensor in state.values())) > most:
        raise ValueError(f"the tensors of {what} must have at most {most:,} bytes in total: got {total:,}")
    found = {tensor: tensor.read() for tensor in set(state.values())}
    return {name: found[tensor] for name, tensor in state.items()}


def plain(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """Return settings in which lists and other objects are replaced by their abbreviated ``repr``.

    Booleans, numbers, strings, and empty values are unchanged. The ``repr`` must be abbreviated because a short pickle
    can contain nested lists whose full ``repr`` has exponential length.
    """
    values = {key if isinstance(key, str) else reprlib.repr(key): value for key, value in settings.items()}
    return {
        key: value if not value or isinstance(value, bool | int | float | str) else reprlib.repr(value)
        for key, value in values.items()
    }


def _read_zip(path: Path, file: BinaryIO, also: Names) -> Any:
    """Read an archive that contains a pickle in ``NAME/data.pkl`` and the tensor data in ``NAME/data/KEY``."""
    with zipfile.ZipFile(file) as archive:
        members = {one.filename: one for one in archive.infolist()}
        if (count := len(archive.infolist())) > MOST_MEMBERS:
            raise ValueError(f"{path.name} must have at most {MOST_MEMBERS:,} members: got {count:,}")
        if len(members) != count:
            raise ValueError(f"multiple members of {path.name} have the same name")
        pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{path.name} was not written by torch.save: expected exactly one member NAME/data.pkl")
        directory = pickles[0].partition("/")[0]
        if any(name.startswith(f"{directory}/code/") for name in members):
            raise ValueError(f"{path.name} is a TorchScript program; save its state_dict() with torch.save")

        def start(name: str) -> int:
            return _start(file, members[name], path)

        def content(name: str, most: int) -> bytes:
            if (size := members[name].file_size) > most:
                raise ValueError(f"{name} in {path.name} must have at most {most:,} bytes: got {size:,}")
            file.seek(start(name))
            return file.read(size)

        def numbers(dtype: Any, key: str, count: int) -> Storage:
            if (name := f"{directory}/data/{key}") not in members:
                raise ValueError(f"the file does not contain the member {name}")
            needed, size = count * np.dtype(dtype).itemsize, members[name].file_size
            if needed > size:
                raise ValueError(f"{name} is truncated (expected at least {needed:,} bytes, got {size:,})")
            return Storage(path, dtype, count, start(name))

        if (order := f"{directory}/byteorder") in members and content(order, 16) != b"little":
            raise ValueError(f"{path.name} was written on a big-endian machine, which is not supported")
        pickled = content(pickles[0], MOST_PICKLED)
        _end(pickled, path)
        return _unpickled(pickled, path, numbers, also)


def _start(file: BinaryIO, member: zipfile.ZipInfo, path: Path) -> int:
    """Return the offset in bytes at which a member's uncompressed content starts in the archive."""
    name = member.filename
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size or member.flag_bits & 1:
        raise ValueError(f"{name} in {path.name} must be stored without compression, as torch.save does")
    file.seek(member.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\3\4":
        raise ValueError(f"{path.name} is damaged: the archive's directory contains a wrong offset for {name}")
    begin = member.header_offset + 30 + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    if begin + member.file_size > path.stat().st_size:
        raise ValueError(f"{path.name} is truncated: {name} extends beyond the end of the file")
    return begin


def _read_legacy(path: Path, file: BinaryIO, also: Names) -> Any:
    """Read a file that was written by a PyTorch version before 1.6.

    The file contains five pickles (magic number, version, machine, object, and keys) followed by the storages. Each
    storage starts with its length.
    """
    file.seek(0)
    content, ends = file.read(MOST_PICKLED), [0]
    for _ in range(5):
        ends.append(ends[-1] + _end(content[ends[-1] :], path))
    parts = [content[begin:end] for begin, end in pairwise(ends)]
    promised: dict[str, tuple[Any, int]] = {}

    def promise(dtype: Any, key: str, count: int) -> Storage:
        if promised.setdefault(key, (dtype, count)) != (dtype, count):
            raise ValueError(f"storage {key} has two different dtypes or lengths")
        return Storage(path, dtype, count, 0)

    version, machine, _, keys = (_unpickled(part, path, promise, also) for part in parts[1:])
    if version != LEGACY_VERSION or not (isinstance(machine, dict) and machine.get("little_endian") is True):
        raise ValueError(f"{path.name} must be little-endian and use version {LEGACY_VERSION} of the legacy format")
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(promised):
        raise ValueError(f"{path.name} is damaged: the list of storages does not match the storages of the tensors")
    begin, size, places = ends[-1], path.stat().st_size, {}
    for key in keys:
        dtype, count = promised[key]
        file.seek(begin)
        if (held := int.from_bytes(file.read(8), "little")) != count:
            raise ValueError(f"{path.name} is damaged: expected {count:,} elements in storage {key}, got {held:,}")
        places[key] = begin + 8
        begin += 8 + count * np.dtype(dtype).itemsize
        if begin > size:
            raise ValueError(f"{path.name} is truncated: storage {key} extends beyond the end of the file")
    return _unpickled(parts[3], path, lambda dtype, key, count: Storage(path, dtype, count, places[key]), also)


def _end(content: bytes, path: Path) -> int:
    """Check that the first pickle in ``content`` has only allowed opcodes, and return the pickle's length in bytes.

    The function limits the nesting depth of tuples because CPython hashes tuples recursively without a depth limit. The
    function also limits the number of values in tuples because a short pickle can build nested tuples of exponential
    size.

    Raises:
        ValueError: If the pickle is damaged, contains an opcode that is not allowed, or exceeds a limit.
    """
    puts = spent = 0
    marks: list[int] = []
    # For each object on the pickle's stack: the nesting depth of its tuples, and the number of values in its tuples.
    stack: list[tuple[int, int]] = []
    memo: dict[int, tuple[int, int]] = {}
    try:
        for instruction, argument, at in pickletools.genops(content):
            name, needs, leaves = instruction.name, instruction.stack_before, instruction.stack_after
            given: Any = argument
            if name not in INSTRUCTIONS:
                raise ValueError(f"the pickle contains the opcode {name}, which is not allowed")
            if name in PUTS:
                puts, place = puts + 1, len(memo) if name == "MEMOIZE" else given
                if place > puts + 256:  # pickle would allocate memory for all memo entries up to this index
                    raise ValueError(f"expected memo indices of at most {puts + 256:,}, got {place:,}")
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
                if below < 0:
                    raise ValueError("the pickle pops an object from an empty stack")
                if depth > DEEPEST:
                    raise ValueError(f"the pickle contains tuples that are nested more than {DEEPEST} levels deep")
            if spent > MOST_IN_TUPLES:
                raise ValueError(f"the tuples in the pickle contain more than {MOST_IN_TUPLES:,} values")
            if name == "STOP":
                return int(at or 0) + 1
    except (ValueError, LookupError) as error:
        raise ValueError(f"{path.name} is not a valid torch.save file: {error}") from error
    raise ValueError(f"{path.name} is not a valid torch.save file: the pickle is truncated")


def _unpickled(content: bytes, path: Path, numbers: Numbers, also: Names) -> Any:
    """Return the object that a pickle builds. The caller must check the pickle with ``_end`` first."""

    def tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
        sizes = (offset, *shape, *strides)
        sound = isinstance(storage, Storage) and isinstance(shape, tuple) and isinstance(strides, tuple)
        if not sound or len(shape) != len(strides) or any(type(one) is not int or one < 0 for one in sizes):
            raise ValueError("the file contains a tensor with invalid metadata")
        if offset + _span(shape, strides) > storage.length or math.prod(shape) > storage.length:
            raise ValueError(
                f"a tensor of shape {list(shape)} exceeds its storage, which has {storage.length:,} elements"
            )
        return Tensor(storage, offset, shape, strides)

    known: dict[str, Any] = {  # one dict per pickle, because a pickle can modify the objects that it refers to
        "collections.OrderedDict": OrderedDict,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        **{f"torch.{name}Storage": _StorageType(dtype) for name, dtype in DTYPES.items()},
        **also,
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in known:
                raise ValueError(
                    f"the pickle refers to {module}.{name}, which would run code; save only model.state_dict()"
                )
            return known[f"{module}.{name}"]

        def persistent_load(self, pid: Any) -> Storage:
            kind, dtype, key, _, count, *view = pid
            if kind != "storage" or type(dtype) is not _StorageType or type(key) is not str or view not in ([], [None]):
                raise ValueError("the file contains a storage with invalid metadata")
            if type(count) is not int or count < 0:
                raise ValueError("the length of a storage must be a nonnegative integer")
            return numbers(dtype.dtype, key, count)

    wrong = (pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, EOFError, OverflowError)
    try:
        return Unpickler(io.BytesIO(content), encoding="utf-8").load()
    except wrong as error:
        raise ValueError(f"{path.name} is not a valid torch.save file: {error}") from error


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of storage elements that a tensor spans, from its first to its last element."""
    if not math.prod(shape):
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
