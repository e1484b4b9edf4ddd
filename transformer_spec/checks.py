"""Input checks on plain integers, strings, and arrays. All packages use them, and therefore raise the same errors.

The checks don't depend on a framework: the caller passes shapes as tuples, and dtypes as NumPy names. Each error
message states the requirement and the value that was passed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np

Shape = Sequence[int | None]  # None for a size that is unknown because the code is traced


def some(problems: Sequence[str]) -> str:
    """Join the first five problems into one line, which ends with the number of omitted problems, if any."""
    return "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise a ValueError unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        got = repr(value)
        got = got if len(got) < 100 else type(value).__name__  # for example, a dict of all weights
        raise ValueError(f"{name} must be one of {', '.join(choices)}: got {got}")


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return an integer of any type, such as a NumPy integer, as a Python ``int``.

    Args:
        name: Name of the value in the error message.
        value: Value to check.
        minimum: Smallest allowed value.
        maximum: Largest allowed value. None means no limit.

    Raises:
        TypeError: If the value is not an integer, or is a bool.
        ValueError: If the value is less than ``minimum`` or greater than ``maximum``.
    """
    try:
        integer = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        integer = None
    if integer is None:
        raise TypeError(f"{name} must be an integer: got {value!r}")
    if integer < minimum:
        raise ValueError(f"{name} must be at least {minimum}: got {integer}")
    if maximum is not None and integer > maximum:
        raise ValueError(f"{name} must be at most {maximum:,}: got {integer:,}")
    return integer


def check_number(name: str, value: Any, needed: str, holds: Callable[[float], bool]) -> int | float:
    """Return a number of any type, such as a NumPy number, as a Python number.

    Args:
        name: Name of the value in the error message.
        value: Value to check.
        needed: Description of the allowed values, which is included in the error message.
        holds: Function that returns True for allowed values.

    Raises:
        TypeError: If the value is not a number, or is a bool.
        ValueError: If the value is infinite, NaN, or not one of the allowed values.
    """
    value = value.item() if isinstance(value, np.number) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number: got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer that exceeds the range of floats
        number = math.inf
    if not math.isfinite(number) or not holds(number):
        raise ValueError(f"{name} must be {needed}: got {value}")
    return value


def random_stream(seed: int, *indices: int) -> list[int]:
    """Return the integers that seed one stream of random numbers, such as the stream for a sample or a step's dropout.

    NumPy splits large integers into 32-bit words and ignores trailing zero words. If a large seed were returned as one
    integer, seed 2**32 would become the words [0, 1], the same as seed 0 with index 1. Therefore, the upper bits of a
    large seed are returned as a separate integer after the indices.
    """
    if seed < 2**32:
        return [seed, *indices]
    return [seed % 2**32, *indices, *[0] * (2 - len(indices)), seed >> 32]


def check_fields(what: str, fields: Iterable[str], needed: Iterable[str]) -> None:
    """Raise a ValueError if fields are unknown or missing.

    ``what`` is the phrase for the fields in the error message.
    """
    found, known = set(fields), set(needed)
    if unknown := sorted(map(str, found - known)):
        raise ValueError(f"unknown {what}: {', '.join(unknown)}")
    if missing := sorted(known - found):
        raise ValueError(f"missing {what}: {', '.join(missing)}")


def check_type(name: str, value: Any, kind: type) -> None:
    """Raise a TypeError unless a value is an instance of a class.

    If the class is a dataclass and the value is a dict, the message shows how to convert it.
    """
    if not isinstance(value, kind):
        remedy = f"; write {kind.__name__}(**{name})" if isinstance(value, dict) and is_dataclass(kind) else ""
        raise TypeError(f"{name} must be a {kind.__name__}: got {type(value).__name__}{remedy}")


def check_unmasked(name: str, array: Any) -> None:
    """Raise a TypeError for a masked array, because frameworks would silently ignore its mask."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array: got a masked array; call .filled(value) first")


def to_array(name: str, rows: Any) -> np.ndarray:
    """Convert a caller's IDs or mask to an array.

    Raises:
        TypeError: If the input is a masked array.
        ValueError: If the rows have different lengths.
    """
    check_unmasked(name, rows)
    try:
        return np.asarray(rows)
    except ValueError as error:
        if "inhomogeneous" not in str(error):
            raise
        raise ValueError(f"{name} must have rows of equal length: got different lengths; pad the rows") from None


def check_ids(
    name: str,
    shape: Shape,
    dtype: str,
    vocab_size: int,
    max_positions: int | None,
    values: np.ndarray | None,
) -> None:
    """Check token IDs. Some frameworks would silently clamp or wrap invalid IDs, or return NaN for them.

    Args:
        name: Name that the error message uses for the IDs.
        shape: Shape of the IDs, [batch, length].
        dtype: NumPy name of the dtype of the IDs.
        vocab_size: Size of the vocabulary. All IDs must be less than this size.
        max_positions: Maximum length in tokens. None means no limit.
        values: The IDs, or None if they can't be read because the code is traced.

    Raises:
        TypeError: If the IDs are not integers.
        ValueError: If the IDs have the wrong rank, are empty or too long, or contain an ID outside the vocabulary.
    """
    if 0 in shape:  # this check comes first, because NumPy converts an empty list to floats
        raise ValueError(f"{name} must contain at least one token: got shape {tuple(shape)}")
    if not dtype.startswith(("int", "uint")):
        raise TypeError(f"{name} must be integers: got {dtype}")
    if len(shape) != 2:
        raise ValueError(f"{name} must have shape [batch, length]: got {tuple(shape)}")
    if max_positions is not None and shape[1] is not None and shape[1] > max_positions:
        raise ValueError(f"{name} must be at most {max_positions} tokens long: got {shape[1]}")
    if values is not None:
        for extreme, at in ((values.min(), np.argmin), (values.max(), np.argmax)):
            if not 0 <= extreme < vocab_size:
                row, column = np.unravel_index(at(values), values.shape)
                raise ValueError(f"{name} must be in [0, {vocab_size}): got {extreme} at [{row}, {column}]")


def check_mask(name: str, shape: Shape, dtype: str, needed: Shape) -> None:
    """Raise a TypeError unless a mask is boolean, and a ValueError unless it has the required shape.

    Floating-point masks are not accepted, because their meaning differs between frameworks. Some frameworks add the
    mask to the scores, and others cast the mask to bool.
    """
    if dtype != "bool":
        raise TypeError(f"{name} must be boolean, True where attention is allowed: got {dtype}")
    _check_shape(name, shape, needed)


def check_same_batch(source_shape: Shape, target_shape: Shape) -> None:
    """Raise a ValueError unless source and target contain the same number of sequences."""
    _check_agree("source_ids and target_ids", "batch size", source_shape[0], target_shape[0])


def check_translations(shape: Shape, batch: int) -> None:
    """Raise a ValueError unless the shape is [batch, T], or [batch, N, T] for N translations of each sequence."""
    if len(shape) not in (2, 3) or shape[0] != batch or 0 in shape:
        needed = f"[{batch}, length] or [{batch}, count, length]"
        raise ValueError(f"target_ids must have shape {needed}: got {tuple(shape)}")


def check_positions(name: str, value: Any, max_positions: int | None) -> int:
    """Return a number of target positions as an ``int``. Raise a ValueError if it exceeds the model's limit."""
    integer = check_integer(name, value, minimum=1)
    if max_positions is not None and integer > max_positions:
        raise ValueError(f"{name} must be at most {max_positions} for this model: got {integer}")
    return integer


def check_next_ids(shape: Shape, length: int | None, room: Shape) -> None:
    """Check that a decoding step fits into the cache.

    Args:
        shape: Shape of the IDs, one token per hypothesis.
        length: Number of positions that the cache contains, or None if the code is traced.
        room: Shape of the cache's mask, [hypotheses, 1, 1, capacity].

    Raises:
        ValueError: If there isn't one token per hypothesis, or the cache is full.
    """
    _check_shape("target_ids", shape, room[:1])
    if length is not None and length == room[3]:
        raise ValueError(f"the cache is full: all {length} positions are in use")


def check_capacity(length: Any, more: int | None, capacity: int | None) -> None:
    """Raise a ValueError unless a cache has room for ``more`` new positions. None means that a size is unknown."""
    if None not in (length, more, capacity) and length + more > capacity:
        raise ValueError(
            f"the cache must have room for {length + more} positions in total ({length} are in use): got {capacity}"
        )


def check_rows(rows: Any, hypotheses: int, sequences: int) -> None:
    """Check the row indices that select the new hypotheses of a cache.

    A cache stores the encoder memory once per sequence, so each new hypothesis must belong to the same sequence as the
    hypothesis that it replaces.

    Args:
        rows: For each hypothesis, the index of the row that replaces it.
        hypotheses: Number of hypotheses.
        sequences: Number of source sequences. Hypotheses of the same sequence are in adjacent rows.

    Raises:
        ValueError: If a row belongs to a different sequence than the hypothesis that it replaces.
    """
    _check_shape("rows", np.shape(rows), (hypotheses,))
    places, beam_size = np.arange(hypotheses), hypotheses // sequences
    if moved := np.flatnonzero(np.asarray(rows) // beam_size != places // beam_size).tolist():
        got = f"got row {np.asarray(rows)[moved[0]]} for row {moved[0]}"
        raise ValueError(
            f"rows must replace each hypothesis with a hypothesis of the same sequence: {got}; to reorder sequences, "
            "create a new cache"
        )


def check_given(memory: Any, source_ids: Any, source_mask: Any) -> None:
    """Raise a ValueError if the memory is missing, or if both the source IDs and the source mask are missing.

    The source IDs or the mask specify the padding of the memory.
    """
    if memory is None:
        raise ValueError("a Decoder requires memory because it has no encoder: got None")
    if source_ids is None and source_mask is None:
        raise ValueError(
            "source_ids or source_mask must be given, because they specify the padding of the memory: got neither"
        )


def check_memory(shape: Shape, dtype: str, needed: Shape, needed_dtype: str) -> None:
    """Raise a TypeError unless the memory has the required dtype, and a ValueError unless it has the required shape."""
    if dtype != needed_dtype:
        raise TypeError(f"memory must be {needed_dtype}: got {dtype}")
    _check_shape("memory", shape, needed)


def check_attention(query: Shape, key: Shape, value: Shape) -> None:
    """Check the shapes of attention inputs, which could otherwise broadcast to an unintended result.

    Args:
        query: Shape [batch, heads, L, d_k].
        key: Shape [batch, heads, M, d_k].
        value: Shape [batch, heads, M, d_v].

    Raises:
        ValueError: If the shapes of the arguments don't match.
    """
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) != 4:
            raise ValueError(f"{name} must have shape [batch, heads, length, size]: got {tuple(shape)}")
        if 0 in shape:
            raise ValueError(f"{name} must not be empty: got {tuple(shape)}")
    _check_agree("query and key", "d_k", query[3], key[3])
    _check_agree("key and value", "length", key[2], value[2])
    for axis, meaning in ((0, "batch size"), (1, "number of heads")):
        _check_agree("query and key", meaning, query[axis], key[axis])
        _check_agree("key and value", meaning, key[axis], value[axis])


def check_attention_mask(mask: Shape, dtype: str, query: Shape, key: Shape) -> None:
    """Raise a TypeError unless a mask is boolean, and a ValueError unless it broadcasts to [batch, heads, L, M]."""
    if dtype != "bool":
        raise TypeError(f"mask must be boolean, True where attention is allowed: got {dtype}")
    _check_broadcasts("mask", mask, (*query[:3], key[2]))


def check_attention_bias(bias: Shape, query: Shape, key: Shape) -> None:
    """Raise a ValueError unless a bias on the scores broadcasts to [batch, heads, L, M]."""
    _check_broadcasts("bias", bias, (*query[:3], key[2]))


def _check_broadcasts(name: str, shape: Shape, needed: Shape) -> None:
    if len(shape) != 4 or any(
        None not in (size, full) and size not in (1, full) for size, full in zip(shape, needed, strict=True)
    ):
        remedy = f"; a {name} must have four axes: batch, heads, queries, keys" if len(shape) != 4 else ""
        raise ValueError(f"{name} must broadcast to {needed}: got {tuple(shape)}{remedy}")


def _check_agree(names: str, meaning: str, first: int | None, second: int | None) -> None:
    if None not in (first, second) and first != second:
        raise ValueError(f"{names} must have the same {meaning}: got {first} and {second}")


def _check_shape(name: str, shape: Shape, needed: Shape) -> None:
    if len(shape) != len(needed) or any(
        None not in (size, full) and size != full for size, full in zip(shape, needed, strict=True)
    ):
        raise ValueError(f"{name} must have shape {tuple(needed)}: got {tuple(shape)}")


def check_labels(shape: Shape, target_shape: Shape) -> None:
    """Raise a ValueError unless the labels have the shape of the decoder input: one token per position."""
    _check_shape("labels", shape, target_shape)


def check_logits(shape: Shape, labels_shape: Shape, vocab_size: int) -> None:
    """Raise a ValueError unless the logits contain, for each label, one value per token in the vocabulary."""
    _check_shape("labels", labels_shape, shape[:2])
    _check_shape("logits", shape, (*labels_shape, vocab_size))


def check_accumulation(accumulation_steps: int, batch: int) -> None:
    """Raise a ValueError unless the batch can be divided into micro-batches of equal size."""
    if batch % accumulation_steps:
        raise ValueError(f"accumulation_steps must divide the batch size: got {accumulation_steps} and {batch}")


def check_trainable(dtype: str, mixed_bfloat16: bool, supported: bool) -> None:
    """Raise a ValueError if the dtype of the weights doesn't support training or the requested mixed precision."""
    if dtype not in ("float64", "float32"):
        raise ValueError(
            f"training requires float32 or float64 weights: got {dtype}; to compute in bfloat16, set mixed_bfloat16"
        )
    if mixed_bfloat16 and not supported:
        raise ValueError("mixed_bfloat16 is not supported by this package")
    if mixed_bfloat16 and dtype != "float32":
        raise ValueError(f"mixed_bfloat16 requires float32 weights: got {dtype}")
