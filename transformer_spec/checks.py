"""Contracts on plain ints, strings and arrays, so that every backend raises the same error.

Nothing here knows a framework: a port hands over shapes as tuples and dtypes by their NumPy name. A message
says what is wrong, what was got and what is needed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np

Shape = Sequence[int | None]  # None is a length not known while tracing


def some(problems: Sequence[str]) -> str:
    """Return the first few in one line, and how many more there are."""
    return "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}: got {value!r}")


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return an integer of any kind, such as NumPy's, as Python's.

    Raises:
        TypeError: The value is not an integer; a bool is not.
        ValueError: It is below ``minimum`` or above ``maximum``.
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
    """Return a number of any kind, such as NumPy's, as Python's.

    Raises:
        TypeError: The value is not a number; a bool is not.
        ValueError: It is not finite, or does not hold.
    """
    value = value.item() if isinstance(value, np.number) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number: got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not math.isfinite(number) or not holds(number):
        raise ValueError(f"{name} must be {needed}: got {value}")
    return value


def check_fields(what: str, fields: Iterable[str], needed: Iterable[str]) -> None:
    """Raise ValueError unless the fields are the needed ones; ``what`` is what the message calls them."""
    found, known = set(fields), set(needed)
    if unknown := sorted(map(str, found - known)):
        raise ValueError(f"unknown {what}: {', '.join(unknown)}")
    if missing := sorted(known - found):
        raise ValueError(f"missing {what}: {', '.join(missing)}")


def check_type(name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless a value is an instance of a class; of a dataclass, a dict may have the fields."""
    if not isinstance(value, kind):
        remedy = f"; write {kind.__name__}(**{name})" if isinstance(value, dict) and is_dataclass(kind) else ""
        raise TypeError(f"{name} must be a {kind.__name__}: got {type(value).__name__}{remedy}")


def check_unmasked(name: str, array: Any) -> None:
    """Raise TypeError for a masked array, whose mask every framework would drop."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array: got a masked array; call .filled(value) first")


def to_array(name: str, rows: Any) -> np.ndarray:
    """Return ids or a mask from the outside as an array.

    Raises:
        TypeError: If it is a masked array.
        ValueError: If the rows differ in length.
    """
    check_unmasked(name, rows)
    try:
        return np.asarray(rows)
    except ValueError as error:
        if "inhomogeneous" not in str(error):
            raise
        raise ValueError(f"{name} must have rows of one length: got several, which padding makes one") from None


def check_ids(
    name: str,
    shape: Shape,
    dtype: str,
    vocab_size: int,
    max_positions: int | None,
    values: np.ndarray | None,
) -> None:
    """Refuse token ids that some frameworks would clamp, wrap or turn into NaN.

    Args:
        name: What the ids are called in the message.
        shape: The shape of the ids, [batch, length].
        dtype: The dtype of the ids, by its NumPy name.
        vocab_size: One more than the largest id.
        max_positions: The longest sequence, in tokens; None where there is no limit.
        values: The ids; None inside a traced function, where values cannot be looked at.

    Raises:
        TypeError: The ids are not integers.
        ValueError: Wrong rank, nothing in it, too long, or an id outside the vocabulary.
    """
    if not dtype.startswith(("int", "uint")):
        raise TypeError(f"{name} must be integers: got {dtype}")
    if len(shape) != 2:
        raise ValueError(f"{name} must have shape [batch, length]: got {tuple(shape)}")
    if 0 in shape:
        raise ValueError(f"{name} must hold at least one token: got shape {tuple(shape)}")
    if max_positions is not None and shape[1] is not None and shape[1] > max_positions:
        raise ValueError(f"{name} must be at most {max_positions} tokens long: got {shape[1]}")
    if values is not None:
        for extreme, at in ((values.min(), np.argmin), (values.max(), np.argmax)):
            if not 0 <= extreme < vocab_size:
                row, column = np.unravel_index(at(values), values.shape)
                raise ValueError(f"{name} must lie in [0, {vocab_size}): got {extreme} at [{row}, {column}]")


def check_mask(name: str, shape: Shape, dtype: str, needed: Shape) -> None:
    """Raise TypeError unless a mask is boolean, ValueError unless it has the needed shape.

    Floats are refused because frameworks read them in opposite ways (added to the scores, or cast to bool).
    """
    if dtype != "bool":
        raise TypeError(f"{name} must be boolean, True where attention is allowed: got {dtype}")
    _check_shape(name, shape, needed)


def check_same_batch(source_shape: Shape, target_shape: Shape) -> None:
    """Raise ValueError unless source and target hold the same number of sentences."""
    _check_agree("source_ids and target_ids", "batch size", source_shape[0], target_shape[0])


def check_translations(shape: Shape, batch: int) -> None:
    """Raise ValueError unless these are translations of the sentences: [batch, T], or [batch, N, T] for N of each."""
    if len(shape) not in (2, 3) or shape[0] != batch or 0 in shape:
        needed = f"[{batch}, length] or [{batch}, count, length]"
        raise ValueError(f"target_ids must have shape {needed}: got {tuple(shape)}")


def check_positions(name: str, value: Any, max_positions: int | None) -> int:
    """Return how many target positions are meant, as ``check_integer``; ValueError if the model has fewer."""
    integer = check_integer(name, value, minimum=1)
    if max_positions is not None and integer > max_positions:
        raise ValueError(f"{name} must be at most {max_positions}, the model's positions: got {integer}")
    return integer


def check_next_ids(shape: Shape, length: int | None, room: Shape) -> None:
    """Refuse a decoding step that the cache has no place for.

    Args:
        shape: The shape of the ids, one token for each hypothesis.
        length: How many positions the cache holds; None while tracing.
        room: The shape of the cache's mask, [hypotheses, 1, 1, capacity].

    Raises:
        ValueError: Not one token for each hypothesis, or no room for another position.
    """
    _check_shape("target_ids", shape, room[:1])
    if length is not None and length == room[3]:
        raise ValueError(f"the cache must have room for the next target position: all {length} are taken")


def check_room(length: Any, more: int | None, capacity: int | None) -> None:
    """Raise ValueError unless a cache that holds ``length`` positions has room for more; None is not known."""
    if None not in (length, more, capacity) and length + more > capacity:
        raise ValueError(f"a cache of {capacity} positions must have room: {length} are taken, got {more} more")


def check_given(memory: Any, source_ids: Any, source_mask: Any) -> None:
    """Raise ValueError unless there is a memory, and what says which of its positions hold tokens."""
    if memory is None:
        raise ValueError("memory must be given: a decoder alone has no encoder")
    if source_ids is None and source_mask is None:
        raise ValueError("source_ids or source_mask must be given, to tell what of the memory is padding: got neither")


def check_memory(shape: Shape, dtype: str, needed: Shape, needed_dtype: str) -> None:
    """Raise TypeError unless the memory is of the model's dtype, ValueError unless it has the source's shape."""
    if dtype != needed_dtype:
        raise TypeError(f"memory must be {needed_dtype}: got {dtype}")
    _check_shape("memory", shape, needed)


def check_attention(query: Shape, key: Shape, value: Shape) -> None:
    """Refuse operands that attention would broadcast or multiply into something else.

    Args:
        query: Shape [batch, heads, L, d_k].
        key: Shape [batch, heads, M, d_k].
        value: Shape [batch, heads, M, d_v].

    Raises:
        ValueError: Shapes that do not fit.
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
    """Raise TypeError unless a mask is boolean, ValueError unless it broadcasts to [batch, heads, L, M]."""
    if dtype != "bool":
        raise TypeError(f"mask must be boolean, True where attention is allowed: got {dtype}")
    needed = (*query[:3], key[2])
    if len(mask) != 4 or any(
        None not in (size, full) and size not in (1, full) for size, full in zip(mask, needed, strict=True)
    ):
        raise ValueError(f"mask must broadcast to {needed}: got {tuple(mask)}")


def _check_agree(names: str, meaning: str, first: int | None, second: int | None) -> None:
    if None not in (first, second) and first != second:
        raise ValueError(f"{names} must agree in {meaning}: got {first} and {second}")


def _check_shape(name: str, shape: Shape, needed: Shape) -> None:
    if len(shape) != len(needed) or any(
        None not in (size, full) and size != full for size, full in zip(shape, needed, strict=True)
    ):
        raise ValueError(f"{name} must have shape {tuple(needed)}: got {tuple(shape)}")


def check_labels(shape: Shape, target_shape: Shape) -> None:
    """Refuse labels of another shape than what the decoder reads: each position has one right next token."""
    _check_shape("labels", shape, target_shape)


def check_logits(shape: Shape, labels_shape: Shape, vocab_size: int) -> None:
    """Raise ValueError unless there is one logit per target token at the position of each label."""
    _check_shape("labels", labels_shape, shape[:2])
    _check_shape("logits", shape, (*labels_shape, vocab_size))


def check_accumulation(accumulation_steps: int, batch: int) -> None:
    """Refuse a batch that does not fall into slices of equal size."""
    if batch % accumulation_steps:
        raise ValueError(f"accumulation_steps must divide the batch: got {accumulation_steps} and {batch} sentences")


def check_trainable(dtype: str, mixed_bfloat16: bool, supported: bool) -> None:
    """Refuse to train weights that are too coarse to take small steps, and mixed precision where it cannot be had."""
    if dtype not in ("float64", "float32"):
        raise ValueError(f"training needs float32 or float64 weights: got {dtype}; mixed_bfloat16 computes in bfloat16")
    if mixed_bfloat16 and not supported:
        raise ValueError("mixed_bfloat16 is not available in this backend")
    if mixed_bfloat16 and dtype != "float32":
        raise ValueError(f"mixed_bfloat16 needs float32 weights: got {dtype}")
