"""Conditions that hide bugs: constant weights, which are replaced, and inputs, about which the report warns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from transformer_parity.engine.tensors import Tensors, digest
from transformer_parity.pairs.contract.arrays import is_float, varied
from transformer_parity.pairs.contract.implementation import Arrays

EMPTY, NOT_FINITE = "empty", "not finite"  # fingerprints of tensors without values


def without_constants(weights: Arrays, fixed: Sequence[str]) -> tuple[Tensors, list[str]]:
    """Replace the values of constant weights with random values.

    Zero biases and unit scales hide whether a port uses them. Zeros become small numbers with both signs, and any other
    constant is scaled by random factors from 0.8 to 1.2.

    Args:
        weights: The weights.
        fixed: Patterns for the names of weights that must not be changed.

    Returns:
        All weights, and the names of the replaced weights.
    """
    rng = np.random.default_rng(0)
    found, replaced = {}, []
    for name, array in weights.items():
        found[name] = array
        if not _is_constant(array) or _is_fixed(name, fixed):
            continue
        constant = float(array.flat[0])
        noise = rng.normal(0.0, 0.1, array.shape) if constant == 0.0 else constant * rng.uniform(0.8, 1.2, array.shape)
        found[name] = noise.astype(array.dtype)
        replaced.append(name)
    return found, replaced


def varied_inputs(inputs: Arrays, size: float, rng: np.random.Generator) -> Tensors:
    """Return the inputs, with random relative changes of all floating-point values except masks."""
    return varied(inputs, size, rng) | {name: array for name, array in inputs.items() if is_mask(array)}


def fixed_constants(weights: Arrays, fixed: Sequence[str]) -> list[str]:
    """Return the names of the constant weights whose values ``without_constants`` doesn't replace."""
    return [name for name, array in weights.items() if _is_constant(array) and _is_fixed(name, fixed)]


def _is_constant(array: np.ndarray) -> bool:
    return is_float(array) and array.size > 0 and bool((array == array.flat[0]).all() and np.isfinite(array.flat[0]))


def _is_fixed(name: str, fixed: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in fixed)


def fingerprints(tensors: Arrays) -> dict[str, Any]:
    """Return a short value for each tensor, to compare the results for different inputs.

    It is the same if the values are the same, or if all elements are equal to one number, regardless of the shape.
    """
    return {name: _fingerprint(array) for name, array in tensors.items()}


def _fingerprint(array: np.ndarray) -> Any:
    if not array.size:
        return EMPTY
    if not np.isfinite(np.asarray(array, np.float64)).any():
        return NOT_FINITE
    return float(array.flat[0]) if (array == array.flat[0]).all() else digest(array)


def unusable(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason why a comparison with these results would be meaningless; empty if there is none.

    Args:
        results: The fingerprints of the original's results, one dict per batch.
    """
    for name in (name for found in results for name, value in found.items() if value == NOT_FINITE):
        return f"all values of {name!r} are NaN or infinite"
    if not any(results):
        return "there are no results"
    if len(results) > 1:
        return "" if any(found != results[0] for found in results) else "the results are the same for all inputs"
    return "" if any(value not in (EMPTY, 0.0) for value in results[0].values()) else "all results are zero"


def warnings(batches: Sequence[Arrays]) -> list[str]:
    """Return descriptions of properties that the inputs don't test."""
    found = [*_of_sizes(batches[0]), *_of_masks(batches)]
    if len(batches) > 1:
        found += [
            f"input {name!r} is the same for every seed"
            for name, array in batches[0].items()
            if array.ndim
            and all(name in other and np.array_equal(array, other[name]) for other in batches[1:])
            and not is_mask(array)
        ]
    return found


def _of_sizes(inputs: Arrays) -> Iterator[str]:
    arrays = {name: array for name, array in inputs.items() if array.ndim}
    if arrays and all(array.shape[0] == 1 for array in arrays.values()):
        yield "the batch size is 1, so a dependence on other sequences in the batch can't be seen"
    for name, array in arrays.items():
        sizes = [size for size in array.shape if size > 1]
        if len({*sizes}) < len(sizes):
            yield f"input {name!r} has axes of equal size {list(array.shape)}, so exchanged axes may have valid shapes"
    ids = [name for name, array in arrays.items() if array.ndim == 2 and array.dtype.kind in "iu"]
    lengths = {arrays[name].shape[1] for name in ids if not is_mask(arrays[name])}
    if len(ids) > 1 and len(lengths) == 1 and not all(is_mask(arrays[name]) for name in ids[1:]):
        yield f"all inputs with token IDs have the length {lengths.pop()}, so exchanged lengths can't be seen"


def _of_masks(batches: Sequence[Arrays]) -> Iterator[str]:
    masks = {name: [batch[name] for batch in batches] for name, array in batches[0].items() if is_mask(array)}
    for name, arrays in masks.items():
        if all(array.all() for array in arrays):
            yield f"the mask {name!r} hides nothing, so padding isn't tested"
    ids = [name for name, array in batches[0].items() if array.ndim == 2 and array.dtype.kind in "iu"]
    if ids and not masks:
        yield "there is no mask among the inputs; padding is tested only if the token IDs contain it"


def is_mask(array: np.ndarray) -> bool:
    """Return whether an input contains only zeros and ones, and has at least two axes."""
    return array.dtype.kind in "biuf" and array.ndim >= 2 and bool(np.isin(array, (0, 1)).all())
