"""Functions on named tensors: plain copies, digests, checks of their structure, and relative errors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from numpy import ndarray

Tensors = dict[str, ndarray]
Digest = tuple[str, tuple[int, ...], str]  # dtype, shape, SHA-256 of the bytes
CHUNK = 1 << 13  # number of values compared at a time, so that all temporary copies fit into the CPU cache


def plain(values: Mapping[str, ndarray]) -> Tensors:
    """Return the values as plain arrays, because a subclass of ndarray could fake its shape and comparisons.

    Raises:
        TypeError: If an array contains objects. Unpickling the objects in the parent process would import a port's
            module.
    """
    return {str(name): _plain(str(name), value) for name, value in values.items()}


def _plain(name: str, value: ndarray) -> ndarray:
    found = value if type(value) is ndarray else np.array(value, subok=False)
    if found.dtype.hasobject:
        raise TypeError(f"{name} must contain numbers: got dtype {found.dtype}")
    return found


def given(arrays: Mapping[str, ndarray], dtype: str) -> Tensors:
    """Return read-only copies of the inputs of an implementation, rounded to bfloat16 if ``dtype`` is bfloat16.

    Rounding the inputs in advance ensures that the port and the reference use the same values. The copies are
    read-only, because a port must not modify its arguments.
    """
    found = {}
    for name, array in arrays.items():
        rounds = dtype == "bfloat16" and array.dtype.kind == "f"
        found[name] = array.astype("bfloat16").astype(array.dtype) if rounds else array.copy(order="K")
        found[name].setflags(write=False)
    return found


def digest(array: ndarray, dtype: str = "") -> Digest:
    """Return a digest, which is the same for two arrays if and only if they have the same dtype, shape, and bits."""
    if _holds_bfloat16(array, dtype):
        array = array.astype("bfloat16")
    # The array is viewed as bytes rather than copied, because the weights of a model may occupy gigabytes.
    whole: Any = array.tobytes() if array.dtype.hasobject else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array.dtype.name, array.shape, hashlib.sha256(whole).hexdigest()


def relative_error(actual: ndarray, expected: ndarray) -> float:
    """Return the L2 norm of the difference divided by the L2 norm of the expected tensor, in float64.

    If the expected tensor contains only zeros, the error is 0 if the actual tensor also contains only zeros, and
    infinite otherwise.

    Raises:
        ValueError: If the shapes differ.
    """
    actual, expected = np.asarray(actual), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        raise ValueError(
            f"actual and expected must have the same shape: got {list(actual.shape)} and {list(expected.shape)}"
        )
    largest = np.maximum(expected.max(initial=0.0), -expected.min(initial=0.0))
    if largest == 0.0:
        return 0.0 if not actual.any() else float("inf")
    actual, expected = actual.ravel(), expected.ravel()
    difference = norm = 0.0
    for start in range(0, expected.size, CHUNK):
        # Values are divided by the largest magnitude, so that their squares neither overflow nor underflow.
        right = expected[start : start + CHUNK] / largest
        wrong = actual[start : start + CHUNK].astype(np.float64) / largest - right
        difference += wrong @ wrong
        norm += right @ right
    return float(np.sqrt(difference / norm))


def structure_problem(actual: ndarray, truth: ndarray, dtype: str) -> str:
    """Return a description of an incorrect shape, an incorrect dtype, or non-finite values.

    If there is no problem, return an empty string.
    """
    if actual.shape != truth.shape:
        return f"shape must be {list(truth.shape)}: got {list(actual.shape)}"
    if actual.dtype.name != dtype and not _holds_bfloat16(actual, dtype):
        return f"dtype must be {dtype}: got {actual.dtype.name}"
    if not np.isfinite(actual).all():
        return f"{int((~np.isfinite(actual)).sum())} of {actual.size} values are NaN or infinite"
    return ""


def _holds_bfloat16(actual: ndarray, dtype: str) -> bool:
    """Return whether a float32 array contains only bfloat16 values.

    NumPy doesn't have a native bfloat16 dtype, so ports may return bfloat16 values as float32.
    """
    if dtype != "bfloat16" or actual.dtype != np.float32:
        return False
    return bool((actual.view(np.uint32) & 0xFFFF == 0).all())


def name_problem(actual: Iterable[str], expected: Iterable[str]) -> str:
    """Return a description of the difference between two lists of names."""
    actual, expected = list(actual), list(expected)
    if missing := [name for name in expected if name not in actual]:
        return f"missing {', '.join(missing[:3])}" + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    if extra := [name for name in actual if name not in expected]:
        return f"unexpected {', '.join(extra[:3])}" + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
    first = next(i for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)) if ours != theirs)
    return f"the names must be in the expected order: got {actual[first]} instead of {expected[first]}"


def digest_problem(actual: Mapping[str, Digest], expected: Mapping[str, Digest]) -> str:
    """Return a description of the first exported weight that differs from the loaded weight; empty if none differs."""
    if sorted(actual) != sorted(expected):
        return name_problem(actual, expected)
    for name, wanted in expected.items():
        if actual[name][1] != wanted[1]:
            return f"exported {name} must have shape {list(wanted[1])}: got {list(actual[name][1])}"
        if actual[name] != wanted:
            return f"exported {name} differs from the loaded value"
    return ""
