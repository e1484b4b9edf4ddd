"""Weight files: safetensors files with the config as JSON in the metadata. Reading a file never executes code from it.

A checkpoint is a weight file that also contains the optimizer's moments as tensors, and the state of the training run
in the metadata. The name of a moment consists of a prefix and the parameter name. Both types of files can contain a
vocabulary as tensors of bytes: either one sentencepiece model as the tensor ``vocabulary``, or other files as the
tensors ``vocabulary.<kind>.<name>``.

The metadata has one entry, a JSON object. It contains ``version``, ``config``, and ``sha256``, which maps the name of
each tensor to its checksum. A checkpoint also contains ``training``. If the file contains only the tensors of the
encoder or the decoder, ``part`` specifies which. A weight file can also contain ``search`` (search settings for its
model) and ``origin`` (the source of the weights). ``sha256`` also contains the checksums of these JSON objects.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, so that safetensors finds the dtype by its name
import numpy as np
from numpy import ndarray
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from transformer_spec.checks import check_choice
from transformer_spec.config import TransformerConfig
from transformer_spec.names import check_float_dtype, check_weights, parameter_shapes, rounded

METADATA_KEY = "transformer-parity"  # only one key, because safetensors writes multiple keys in a random order
FORMAT_VERSION = 2
FIRST_MOMENT = "first_moment."  # prefix of the parameter name
SECOND_MOMENT = "second_moment."
VOCABULARY = "vocabulary"
NOTES = ("search", "origin")
MOST_NOTES = 2**20  # maximum size in bytes of one note, encoded as JSON
BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes per value, keyed by the dtype in the file; 8 for other dtypes
POINTER = b"version https://git-lfs.github.com/spec/"  # start of a git-lfs pointer file
MOST_POINTER = 1024  # maximum size in bytes of a pointer, as specified by git-lfs
ALIGNED = 64  # alignment of arrays in bytes


class VocabularyFiles(NamedTuple):
    """A vocabulary that is not a sentencepiece model.

    Attributes:
        kind: Name of the vocabulary type. The name consists of letters, digits, and ``_``.
        files: Contents of the files, keyed by name.
    """

    kind: str
    files: Mapping[str, bytes]


def save_weights(
    path: str | Path,
    config: TransformerConfig,
    weights: Mapping[str, ndarray],
    dtype: DTypeLike | None = None,
    vocabulary: bytes | VocabularyFiles | None = None,
    notes: Mapping[str, Mapping[str, Any]] | None = None,
    part: str | None = None,
) -> None:
    """Write the config and the weights to a file atomically: if an error occurs, an existing file remains intact.

    Args:
        path: File to create or replace.
        config: Configuration of the model to which the weights belong.
        weights: One array per canonical parameter name.
        dtype: Dtype in which the weights are stored: float64, float32, float16 or bfloat16, as a name or a NumPy
            dtype. If None, each array keeps its dtype.
        vocabulary: A sentencepiece model, or the files of another type of vocabulary. With a vocabulary, the file
            contains everything that is required to translate text. If None, no vocabulary is stored.
        notes: Up to two dicts that can be converted to JSON: ``search`` contains search settings, and ``origin``
            describes where the weights come from. If None, no notes are added.
        part: If ``encoder`` or ``decoder``, write only the weights of this part. If None, write all weights.

    Raises:
        TypeError: If a weight doesn't have a floating-point dtype, the vocabulary is not bytes, or a note is not a
            dict.
        ValueError: If the weights don't match the config or overflow the dtype, or if a note has an unknown name, is
            too long, or changes when it is converted to JSON and back.
        OSError: If the file can't be written.
    """
    check_weights(config, weights, part=part)
    stored = None if dtype is None else check_float_dtype(dtype)
    kept = {name: weights[name] for name in parameter_shapes(config, part)}
    tensors = {name: rounded(name, array, stored or array.dtype.name) for name, array in kept.items()}
    description = {"config": config.to_dict(), **({} if part is None else {"part": part})}
    description |= {name: _checked_note(name, note) for name, note in (notes or {}).items()}
    write_file(path, description, tensors, vocabulary)


def load_weights(path: str | Path) -> tuple[TransformerConfig, dict[str, ndarray]]:
    """Read the config and the weights from a weight file or a checkpoint. Each array keeps its stored dtype.

    Args:
        path: File written by ``save_weights`` or ``save_checkpoint``.

    Raises:
        OSError: If the file can't be read.
        ValueError: If the file is truncated, corrupt, or in a different format, or its tensors don't match its config.
    """
    with open_file(path, "weight file") as (description, file):
        read_vocabulary(description, file)  # raises an error if the vocabulary is corrupt
        read_notes(description)
        return read_weights(description, file)


def load_vocabulary(path: str | Path) -> bytes | VocabularyFiles | None:
    """Read the vocabulary from a weight file or checkpoint. Return None if the file has no vocabulary.

    Args:
        path: File written by ``save_weights`` or ``save_checkpoint``.

    Raises:
        OSError: If the file can't be read.
        ValueError: If the file is truncated, corrupt, or in a different format.
    """
    with open_file(path, "weight file") as (description, file):
        return read_vocabulary(description, file)


def load_notes(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return the ``search`` and ``origin`` notes of a weight file. If a note is missing, the dict has no such key.

    Args:
        path: File written by ``save_weights`` or ``save_checkpoint``.

    Raises:
        OSError: If the file can't be read.
        ValueError: If the file is truncated, corrupt, or in a different format.
    """
    with open_file(path, "weight file") as (description, _):
        return read_notes(description)


def write_file(
    path: str | Path,
    description: Mapping[str, Any],
    tensors: Mapping[str, ndarray],
    vocabulary: bytes | VocabularyFiles | None,
) -> None:
    """Write a description and tensors to a file atomically. The caller must have checked them.

    Args:
        path: File to create or replace. If it is a symbolic link, the target of the link is replaced.
        description: Metadata, as a dict that can be converted to JSON.
        tensors: C-contiguous arrays. safetensors would silently permute the values of other arrays.
        vocabulary: A sentencepiece model, the files of another type of vocabulary, or None.

    Raises:
        TypeError: If the vocabulary is not bytes.
        ValueError: If the kind of vocabulary is invalid.
        OSError: If the file can't be written.
    """
    tensors = {**tensors, **_vocabulary_tensors(vocabulary)}
    checksums = {name: checksum(name, array) for name, array in tensors.items()}
    checksums |= {name: note_checksum(name, description[name]) for name in NOTES if name in description}
    description = {**description, "version": FORMAT_VERSION, "sha256": checksums}
    text = json.dumps(description, sort_keys=True, allow_nan=False)
    try:
        with replacing(Path(os.path.realpath(path))) as temporary:
            save_tensors(temporary, tensors, {METADATA_KEY: text})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    except OSError as error:  # the message should contain the final path instead of the temporary path
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_fetched(path: Path) -> None:
    """Check that a file is not a git-lfs pointer, which git-lfs writes instead of a file that it hasn't downloaded.

    Raises:
        OSError: If the file can't be read.
        ValueError: If the file is a git-lfs pointer.
    """
    if path.is_file() and path.stat().st_size < MOST_POINTER and path.read_bytes().startswith(POINTER):
        raise ValueError(f"{path.name} is a git-lfs pointer, not the file; fetch the file with `git lfs pull`")


def save_tensors(path: Path, tensors: Mapping[str, ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write C-contiguous arrays to a safetensors file, whose permissions follow the user's umask.

    Raises:
        OSError: If the file can't be written.
        SafetensorError: If safetensors can't write the file.
    """
    path.touch()
    mode = path.stat().st_mode  # save_file restricts the file's permissions
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    os.chmod(path, mode)


def _vocabulary_tensors(vocabulary: bytes | VocabularyFiles | None) -> dict[str, ndarray]:
    """Return a vocabulary as tensors of bytes."""
    if vocabulary is None:
        return {}
    if isinstance(vocabulary, VocabularyFiles):
        if not vocabulary.kind.isidentifier() or not vocabulary.files:
            raise ValueError(f"vocabulary must have files, and its kind must be an identifier: got {vocabulary.kind!r}")
        named = {f"{VOCABULARY}.{vocabulary.kind}.{name}": content for name, content in vocabulary.files.items()}
    else:
        named = {VOCABULARY: vocabulary}
    for name, content in named.items():
        if not isinstance(content, bytes):
            raise TypeError(f"{name} must be bytes: got {type(content).__name__}")
    return {name: np.frombuffer(content, np.uint8) for name, content in named.items()}


def _checked_note(name: str, note: Any) -> dict[str, Any]:
    """Return a note after converting it to JSON and back. Raise an error if the note is invalid."""
    check_choice("note", name, NOTES)
    if not isinstance(note, Mapping):
        raise TypeError(f"{name} must be a dict: got {type(note).__name__}")
    check_plain(name, note)
    text = json.dumps(dict(note), allow_nan=False)
    if len(text) > MOST_NOTES:
        raise ValueError(f"{name} must be at most {MOST_NOTES:,} bytes of JSON: got {len(text):,}")
    return json.loads(text)


def check_plain(name: str, values: Mapping[Any, Any]) -> None:
    """Check that JSON can store a dict unchanged. It can't store tuples, NaN, NumPy numbers, or integer keys.

    Args:
        name: Name of the dict in the error message.
        values: Dict to check.

    Raises:
        ValueError: If JSON can't store a value unchanged. The message contains the key of this value.
    """
    for key, value in values.items():
        try:
            # Compare reprs, because 1, 1.0, True, and np.float64(1) are equal, but have different reprs.
            returns = repr(json.loads(json.dumps({key: value}, allow_nan=False))) == repr({key: value})
        except (TypeError, ValueError, RecursionError):
            returns = False
        if not returns:
            needed = "dicts with string keys, lists, strings, finite numbers, True, False, and None"
            raise ValueError(f"{name}[{key!r}] must contain only {needed}")


def note_checksum(name: str, note: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the JSON list ``[name, note]``, in which the keys of the note are sorted."""
    return hashlib.sha256(json.dumps([name, note], sort_keys=True, allow_nan=False).encode()).hexdigest()


def checksum(name: str, array: ndarray) -> str:
    """Return the SHA-256 of a tensor's name, dtype, and shape (as a JSON list), followed by its bytes in C order."""
    digest = hashlib.sha256(json.dumps([name, array.dtype.name, list(array.shape)]).encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``. Unless an error occurs, the temporary file then replaces ``path``.

    The new file and its directory entry are synced to disk, so that the old file can't reappear after a power failure.

    Raises:
        OSError: If the file can't be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # unique for each writer
    try:
        yield temporary
        _sync(temporary, os.O_RDWR)  # Windows syncs only files that are open for writing
        os.replace(temporary, path)
        if os.name == "posix":  # other systems can't open a directory
            _sync(path.parent, os.O_RDONLY)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path, mode: int) -> None:
    """Wait until a file or the entries of a directory have been written to disk."""
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_file(path: str | Path, kind: str) -> Iterator[tuple[dict[str, Any], safe_open]]:
    """Open a file written by ``write_file``, and yield its description and an object that reads its tensors.

    Errors in the body of the ``with`` statement, such as a TypeError, are re-raised as a ValueError that contains the
    path. ``kind`` describes the type of file in error messages, for example ``weight file``.

    Raises:
        OSError: If the file can't be read.
        ValueError: If the file is truncated, corrupt, or in a different format, or its contents are invalid.
    """
    if Path(path).is_dir():
        held = sorted(file.name for file in Path(path).glob("*.safetensors"))
        instead = f"it contains {', '.join(held)}" if held else "use `parity import` to convert a checkpoint directory"
        raise IsADirectoryError(f"{path} is a directory, not a {kind}; {instead}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no {kind} {path}")
    open(path, "rb").close()  # safetensors reports an unreadable file as missing
    try:
        check_fetched(Path(path))
        with safe_open(path, framework="numpy") as file:
            yield _read_description((file.metadata() or {}).get(METADATA_KEY)), file
    except (SafetensorError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        remedy = "" if Path(path).suffix == ".safetensors" else f"; a {kind} is a .safetensors file"
        raise ValueError(f"{path} is not a usable {kind}: {error}{remedy}") from error


def read_weights(description: Mapping[str, Any], file: safe_open) -> tuple[TransformerConfig, dict[str, ndarray]]:
    """Read the config and weights from an open file. If the file is a checkpoint, ignore its moments."""
    config = TransformerConfig.from_dict(description.get("config", {}))
    beside = (FIRST_MOMENT, SECOND_MOMENT) if "training" in description else ()
    names = [name for name in file.keys() if not _is_vocabulary(name) and not name.startswith(beside)]  # noqa: SIM118
    # Use one large block, because the C library may not return the memory of small arrays to the operating system.
    pieces = map(file.get_slice, names)
    sizes = (BYTES.get(piece.get_dtype(), 8) * math.prod(piece.get_shape()) + ALIGNED for piece in pieces)
    room = np.empty(sum(sizes), np.uint8)
    weights, start = {}, 0
    for name in names:
        array = _read_tensor(description, file, name)
        weights[name] = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(weights[name], array)
        start += -(-array.nbytes // ALIGNED) * ALIGNED
    check_weights(config, weights, part=description.get("part"))
    return config, weights


def read_moments(description: Mapping[str, Any], file: safe_open, prefix: str) -> dict[str, ndarray]:
    """Return the moments with the given prefix in an open checkpoint, keyed by parameter name."""
    names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  not a dict
    return {name.removeprefix(prefix): _read_tensor(description, file, name) for name in names}


def read_vocabulary(description: Mapping[str, Any], file: safe_open) -> bytes | VocabularyFiles | None:
    """Read the vocabulary from an open file. Return None if the file has no vocabulary."""
    names = [name for name in file.keys() if _is_vocabulary(name)]  # noqa: SIM118  not a dict
    contents = {name: _read_bytes(description, file, name) for name in names}
    if not contents:
        return None
    if names == [VOCABULARY]:
        return contents[VOCABULARY]
    kinds = {name.split(".")[1] for name in names if name.count(".") > 1}
    if len(kinds) != 1 or VOCABULARY in names:
        raise ValueError(f"expected the tensors of one vocabulary, got {', '.join(sorted(names))}")
    (kind,) = kinds
    return VocabularyFiles(kind, {name.removeprefix(f"{VOCABULARY}.{kind}."): contents[name] for name in sorted(names)})


def read_notes(description: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the notes (search settings and origin) of an open file. Raise a ValueError if a checksum is wrong."""
    notes = {name: description[name] for name in NOTES if name in description}
    for name, note in notes.items():
        _checked_note(name, note)
        if (found := note_checksum(name, note)) != (needed := description["sha256"].get(name)):
            raise ValueError(f"{name} is damaged: expected SHA-256 {needed}, got {found}")
    return notes


def _is_vocabulary(name: str) -> bool:
    return name == VOCABULARY or name.startswith(f"{VOCABULARY}.")


def _read_bytes(description: Mapping[str, Any], file: safe_open, name: str) -> bytes:
    """Read a tensor of bytes from an open file."""
    content = _read_tensor(description, file, name)
    if content.dtype != np.uint8 or content.ndim != 1:
        raise ValueError(f"expected {name} to be a 1-D uint8 tensor, got {content.dtype} {list(content.shape)}")
    return content.tobytes()


def _read_tensor(description: Mapping[str, Any], file: safe_open, name: str) -> ndarray:
    """Read a tensor from an open file. Raise a ValueError if its checksum is wrong."""
    array = file.get_tensor(name)
    if (found := checksum(name, array)) != (needed := description["sha256"].get(name)):
        raise ValueError(f"{name} is damaged: expected SHA-256 {needed}, got {found}")
    return array


def _read_description(text: str | None) -> dict[str, Any]:
    if text is None:
        raise ValueError(f"the metadata has no entry {METADATA_KEY!r}")
    content = json.loads(text)
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(f"expected format version {FORMAT_VERSION}, got {version!r}")
    if not isinstance(content.get("sha256"), dict):
        raise ValueError("the metadata must contain an object 'sha256' with the checksum of each tensor")
    if unknown := sorted(set(content) - {"version", "config", "part", "training", "sha256", *NOTES}):
        raise ValueError(f"the metadata contains unknown entries: {', '.join(unknown)}")
    return content
