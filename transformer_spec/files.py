"""The weight file: safetensors, with the config as JSON in its metadata. Nothing in it is ever executed.

A checkpoint is a weight file that holds more: the moments of the optimizer, under the names of their parameters behind
a prefix, and what else a training run has to remember, in the metadata. Either may hold a vocabulary: one sentencepiece
model as the tensor ``vocabulary``, or files of another kind as tensors ``vocabulary.<kind>.<name>``, bytes each.

The metadata has one entry, an object in JSON: ``version``, ``config``, ``sha256`` with the checksum of each tensor by
its name, in a checkpoint ``training``, and ``part`` (``encoder`` or ``decoder``) where the file holds no more than that
part's tensors. A weight file may also have ``search``, how to search with its model, and ``origin``, where it came
from: objects, each with its checksum among those of the tensors.
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

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors looks up by name
import numpy as np
from numpy import ndarray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from transformer_spec.checks import check_choice
from transformer_spec.config import TransformerConfig
from transformer_spec.names import FLOAT_DTYPES, check_weights, parameter_shapes, rounded

METADATA_KEY = "transformer-parity"  # one key only: with several, the bytes of the file depend on hash order
FORMAT_VERSION = 2
FIRST_MOMENT = "first_moment."  # before the name of the parameter
SECOND_MOMENT = "second_moment."
VOCABULARY = "vocabulary"
NOTES = ("search", "origin")
MOST_NOTES = 2**20  # bytes of JSON
BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # of a number, by its dtype in the file; others have eight
POINTER = b"version https://git-lfs.github.com/spec/"  # the beginning of a file that git-lfs has not fetched
MOST_POINTER = 1024  # bytes, by the specification of git-lfs
ALIGNED = 64  # bytes: the place of an array is a multiple


class VocabularyFiles(NamedTuple):
    """A vocabulary that was not trained here: its kind, a word of letters, digits and ``_``, and its files by name."""

    kind: str
    files: Mapping[str, bytes]


def save_weights(
    path: str | Path,
    config: TransformerConfig,
    weights: Mapping[str, ndarray],
    dtype: str | None = None,
    vocabulary: bytes | VocabularyFiles | None = None,
    notes: Mapping[str, Mapping[str, Any]] | None = None,
    part: str | None = None,
) -> None:
    """Write config and weights to one file, atomically: whatever fails, an old file stays whole.

    Args:
        path: The file to write or replace.
        config: What the weights are weights of.
        weights: One array per canonical name.
        dtype: How to store them: float64, float32, float16 or bfloat16. None keeps each array's own.
        vocabulary: A sentencepiece model, or files of another kind, so that the file alone can translate.
        notes: Objects of plain values that JSON can hold, by name: ``search`` and ``origin``.
        part: ``encoder`` or ``decoder`` writes that part of the weights alone; None writes all.

    Raises:
        TypeError: A weight is not of a floating-point dtype, the vocabulary is not bytes, or a note is no object.
        ValueError: The weights are not those of the config, or overflow the storage dtype; or a note has another name,
            is too long, or JSON would alter it.
        OSError: The file cannot be written.
    """
    check_weights(config, weights, part=part)
    if dtype is not None:
        check_choice("dtype", dtype, FLOAT_DTYPES)
    kept = {name: weights[name] for name in parameter_shapes(config, part)}
    tensors = {name: rounded(name, array, dtype or array.dtype.name) for name, array in kept.items()}
    description = {"config": config.to_dict(), **({} if part is None else {"part": part})}
    description |= {name: _checked_note(name, note) for name, note in (notes or {}).items()}
    write_file(path, description, tensors, vocabulary)


def load_weights(path: str | Path) -> tuple[TransformerConfig, dict[str, ndarray]]:
    """Read config and weights from a weight file or a checkpoint, each array in the dtype it is stored in.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is truncated, corrupt or not ours, or its tensors contradict its config.
    """
    with open_file(path, "weight file") as (description, file):
        read_vocabulary(description, file)  # a file that is damaged anywhere is not trusted
        read_notes(description)
        return read_weights(description, file)


def load_vocabulary(path: str | Path) -> bytes | VocabularyFiles | None:
    """Read the vocabulary from a weight file or a checkpoint, as it was given to be written; None if it holds none.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is truncated, corrupt or not ours.
    """
    with open_file(path, "weight file") as (description, file):
        return read_vocabulary(description, file)


def load_notes(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read the notes of a weight file, those it has of ``search`` and ``origin``.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is truncated, corrupt or not ours.
    """
    with open_file(path, "weight file") as (description, _):
        return read_notes(description)


def write_file(
    path: str | Path,
    description: Mapping[str, Any],
    tensors: Mapping[str, ndarray],
    vocabulary: bytes | VocabularyFiles | None,
) -> None:
    """Write a description and tensors, already checked, to one file, atomically.

    Args:
        path: The file to write or replace.
        description: Plain values that JSON can hold.
        tensors: C-contiguous arrays; safetensors silently scrambles others, as it writes the memory as it lies.
        vocabulary: A sentencepiece model, files of another kind, or None.

    Raises:
        TypeError: The vocabulary is not bytes.
        ValueError: Its kind is no word.
        OSError: The file cannot be written.
    """
    tensors = {**tensors, **_vocabulary_tensors(vocabulary)}
    checksums = {name: checksum(name, array) for name, array in tensors.items()}
    checksums |= {name: note_checksum(name, description[name]) for name in NOTES if name in description}
    description = {**description, "version": FORMAT_VERSION, "sha256": checksums}
    text = json.dumps(description, sort_keys=True, allow_nan=False)
    try:
        with replacing(Path(path)) as temporary:
            save_tensors(temporary, tensors, {METADATA_KEY: text})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    except OSError as error:  # which names the temporary file, or none
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_fetched(path: Path) -> None:
    """Refuse the small file that git-lfs writes instead of one that it has not fetched.

    Raises:
        OSError: The file cannot be read.
        ValueError: If the file is such a pointer.
    """
    if path.is_file() and path.stat().st_size < MOST_POINTER and path.read_bytes().startswith(POINTER):
        raise ValueError(f"{path.name} is a git-lfs pointer, not the file: fetch the file with `git lfs pull`")


def save_tensors(path: Path, tensors: Mapping[str, ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write C-contiguous arrays to a safetensors file with the permissions of the user's umask.

    Raises:
        OSError: The file cannot be written.
        SafetensorError: The same.
    """
    path.touch()
    mode = path.stat().st_mode  # save_file makes the file private
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    os.chmod(path, mode)


def _vocabulary_tensors(vocabulary: bytes | VocabularyFiles | None) -> dict[str, ndarray]:
    """Return a vocabulary as tensors."""
    if vocabulary is None:
        return {}
    if isinstance(vocabulary, VocabularyFiles):
        if not vocabulary.kind.isidentifier() or not vocabulary.files:
            raise ValueError(f"vocabulary must have a kind that is a word, and files: got {vocabulary.kind!r}")
        named = {f"{VOCABULARY}.{vocabulary.kind}.{name}": content for name, content in vocabulary.files.items()}
    else:
        named = {VOCABULARY: vocabulary}
    for name, content in named.items():
        if not isinstance(content, bytes):
            raise TypeError(f"{name} must be bytes: got {type(content).__name__}")
    return {name: np.frombuffer(content, np.uint8) for name, content in named.items()}


def _checked_note(name: str, note: Any) -> dict[str, Any]:
    """Return a note as it is read again; refuse what is none."""
    check_choice("note", name, NOTES)
    if not isinstance(note, Mapping):
        raise TypeError(f"{name} must be an object with named fields: got {type(note).__name__}")
    check_plain(name, note)
    text = json.dumps(dict(note), allow_nan=False)
    if len(text) > MOST_NOTES:
        raise ValueError(f"{name} must be at most {MOST_NOTES:,} bytes of JSON: got {len(text):,}")
    return json.loads(text)


def check_plain(name: str, values: Mapping[Any, Any]) -> None:
    """Refuse what would not come back from JSON as it is: tuples, keys that are not text, NaN, NumPy's numbers.

    Raises:
        ValueError: A value would not; the message names it, as one of ``name``.
    """
    for key, value in values.items():
        try:
            # Text tells 1 from 1.0, True and np.float64(1), which are equal.
            returns = repr(json.loads(json.dumps({key: value}, allow_nan=False))) == repr({key: value})
        except (TypeError, ValueError, RecursionError):
            returns = False
        if not returns:
            needed = "dicts with text as keys, lists, text, finite numbers, True, False and None"
            raise ValueError(f"{name}[{key!r}] must be made of {needed}")


def note_checksum(name: str, note: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a note: of its name and itself as a list in JSON, with sorted names."""
    return hashlib.sha256(json.dumps([name, note], sort_keys=True, allow_nan=False).encode()).hexdigest()


def checksum(name: str, array: ndarray) -> str:
    """Return the SHA-256 of a tensor: of name, dtype and shape as a list in JSON, then of its bytes in C order."""
    digest = hashlib.sha256(json.dumps([name, array.dtype.name, list(array.shape)]).encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a temporary file beside a file, which takes its place unless something is raised.

    Both the file and its new name are on the disk then: not even a power failure brings the old one back.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # its own for each of several writers
    try:
        yield temporary
        _sync(temporary, os.O_RDWR)  # Windows syncs only what is open for writing
        os.replace(temporary, path)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            _sync(path.parent, os.O_RDONLY)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path, mode: int) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_file(path: str | Path, kind: str) -> Iterator[tuple[dict[str, Any], safe_open]]:
    """Open a file that ``write_file`` wrote and yield its description and its tensors, not yet read.

    What is refused inside the ``with`` is reported as a fault of the file; ``kind`` is what the message calls it.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is truncated, corrupt or not ours, or what it holds is refused.
    """
    if Path(path).is_dir():
        held = sorted(file.name for file in Path(path).glob("*.safetensors"))
        instead = f"it holds {', '.join(held)}" if held else "`parity import` makes one of a checkpoint folder"
        raise IsADirectoryError(f"{path} is a folder, and no {kind}: {instead}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no {kind} {path}")
    open(path, "rb").close()  # safetensors calls a file absent that it may not read
    try:
        check_fetched(Path(path))
        with safe_open(path, framework="numpy") as file:
            yield _read_description((file.metadata() or {}).get(METADATA_KEY)), file
    except (SafetensorError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a usable {kind}: {error}") from error


def read_weights(description: Mapping[str, Any], file: safe_open) -> tuple[TransformerConfig, dict[str, ndarray]]:
    """Read config and weights from an open file; the moments of a checkpoint are left unread."""
    config = TransformerConfig.from_dict(description.get("config", {}))
    beside = (FIRST_MOMENT, SECOND_MOMENT) if "training" in description else ()
    names = [name for name in file.keys() if not _is_vocabulary(name) and not name.startswith(beside)]  # noqa: SIM118
    # In one block, which goes back to the system as a whole. Of many arrays, the C library would keep most for later.
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
    """Read the moments of an open checkpoint, by the names of their parameters."""
    names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  not a dict
    return {name.removeprefix(prefix): _read_tensor(description, file, name) for name in names}


def read_vocabulary(description: Mapping[str, Any], file: safe_open) -> bytes | VocabularyFiles | None:
    """Read the vocabulary of an open file; None if it holds none."""
    names = [name for name in file.keys() if _is_vocabulary(name)]  # noqa: SIM118  not a dict
    contents = {name: _read_bytes(description, file, name) for name in names}
    if not contents:
        return None
    if names == [VOCABULARY]:
        return contents[VOCABULARY]
    kinds = {name.split(".")[1] for name in names if name.count(".") > 1}
    if len(kinds) != 1 or VOCABULARY in names:
        raise ValueError(f"it must hold one vocabulary: got {', '.join(sorted(names))}")
    (kind,) = kinds
    return VocabularyFiles(kind, {name.removeprefix(f"{VOCABULARY}.{kind}."): contents[name] for name in sorted(names)})


def read_notes(description: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the notes of an open file, and refuse one that is not what was written."""
    notes = {name: description[name] for name in NOTES if name in description}
    for name, note in notes.items():
        _checked_note(name, note)
        if (found := note_checksum(name, note)) != (needed := description["sha256"].get(name)):
            raise ValueError(f"{name} is damaged: its SHA-256 must be {needed}: got {found}")
    return notes


def _is_vocabulary(name: str) -> bool:
    return name == VOCABULARY or name.startswith(f"{VOCABULARY}.")


def _read_bytes(description: Mapping[str, Any], file: safe_open, name: str) -> bytes:
    """Read a tensor of an open file that holds bytes."""
    content = _read_tensor(description, file, name)
    if content.dtype != np.uint8 or content.ndim != 1:
        raise ValueError(f"{name} must be uint8 [bytes]: got {content.dtype} {list(content.shape)}")
    return content.tobytes()


def _read_tensor(description: Mapping[str, Any], file: safe_open, name: str) -> ndarray:
    """Read a tensor of an open file, and refuse one that is not what was written."""
    array = file.get_tensor(name)
    if (found := checksum(name, array)) != (needed := description["sha256"].get(name)):
        raise ValueError(f"{name} is damaged: its SHA-256 must be {needed}: got {found}")
    return array


def _read_description(text: str | None) -> dict[str, Any]:
    if text is None:
        raise ValueError(f"its metadata has no entry {METADATA_KEY!r}")
    content = json.loads(text)
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(f"format version must be {FORMAT_VERSION}: got {version!r}")
    if not isinstance(content.get("sha256"), dict):
        raise ValueError("its metadata must have an object 'sha256', with the checksum of each tensor")
    if unknown := sorted(set(content) - {"version", "config", "part", "training", "sha256", *NOTES}):
        raise ValueError(f"its metadata has unknown entries: {', '.join(unknown)}")
    return content
