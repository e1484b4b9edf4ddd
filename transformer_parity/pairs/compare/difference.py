"""The difference between two tensors: a problem with their structure, or a relative error."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import relative_error
from transformer_parity.pairs.contract.arrays import NARROW, is_float

MASKED = -1e4  # scores below this value are masked; float16 can't represent values below -65,504
GAP = 10.0  # smallest ratio of a masked or huge value to all ordinary values


def problem(actual: ndarray, expected: ndarray, dtype: str, is_output: bool) -> str:
    """Return a description of a wrong shape, a wrong dtype, or values that aren't finite; empty if there is none.

    Args:
        actual: The port's tensor.
        expected: The original's tensor.
        dtype: The working dtype. In bfloat16 and float16, a port may also return a wider dtype.
        is_output: Whether the tensor is an output of the model, in contrast to an intermediate value.
    """
    if actual.shape != expected.shape:
        hint = "; describe the order of its axes in names" if actual.size == expected.size and not is_output else ""
        return f"shape must be {list(expected.shape)}: got {list(actual.shape)}{hint}"
    if is_float(expected) != is_float(actual):
        return f"dtype must be {'floating point' if is_float(expected) else 'integer'}: got {actual.dtype.name}"
    if not is_float(expected):
        return ""
    if is_output and dtype not in NARROW and actual.dtype.name != dtype:
        return f"dtype must be {dtype}: got {actual.dtype.name}"
    mine, theirs = kept(actual), kept(expected)
    if not np.array_equal(mine, theirs):
        wrong = int((mine != theirs).sum())
        kinds = "masked, NaN, or infinite" if (~mine & theirs).any() else "finite"
        return f"{wrong} of {actual.size} values are {kinds}, in contrast to the original's"
    for kind, what in (np.isnan, "NaN"), (np.isposinf, "positive infinity"):
        if wrong := int((kind(np.asarray(actual, np.float64)) != kind(np.asarray(expected, np.float64))).sum()):
            return f"{wrong} of {actual.size} values differ from the original's in whether they are {what}"
    return ""


def kept(array: ndarray) -> ndarray:
    """Return a boolean array that is True where a value is finite and not masked.

    Implementations represent masked scores by different large negative values. A masked score is a constant, a sum of
    such constants, or the sum of a constant and an ordinary score.
    """
    array = np.asarray(array, np.float64)
    finite = np.isfinite(array)
    masked = finite & (array <= MASKED)
    most = np.abs(array[finite & ~masked]).max(initial=0.0)
    masked &= array <= -GAP * most
    if masked.sum() < 2 or np.array_equal(masked, finite):  # these are ordinary values of a large tensor
        return finite
    values = array[masked]
    times = np.round(values / values.max())
    is_near = np.abs(values - times * values.max()) <= 2.0 * times * most - 2.0**-7 * values
    return finite & ~masked if is_near.all() else finite


def parts(array: ndarray) -> list[ndarray]:
    """Return boolean arrays that select the values to compare with each other.

    If some values are huge, such as 1e30 for padding, they are a separate part. In the norm of the whole tensor, the
    other values would vanish.
    """
    found, size = kept(array), np.abs(np.asarray(array, np.float64))
    huge = found & (size >= -MASKED)
    rest = found & ~huge
    if huge.any() and rest.any() and size[huge].min() >= GAP * size[rest].max():
        return [rest, huge]
    return [found]


def difference(actual: ndarray, expected: ndarray, scale: float = 0.0) -> float:
    """Return the relative error of a tensor, or infinity if the tensors can't be compared.

    Args:
        actual: The port's tensor.
        expected: The original's tensor.
        scale: The size of the error that rounding causes, for a tensor that is otherwise zero. The error is then
            relative to this size.
    """
    if actual.shape != expected.shape:
        return math.inf
    if not is_float(expected):
        return 0.0 if np.array_equal(actual, expected) else math.inf
    finite = kept(expected)
    if not np.array_equal(kept(actual), finite):
        return math.inf
    if scale:
        return float(np.linalg.norm(np.asarray(actual[finite], np.float64) - expected[finite])) / scale
    return max(relative_error(actual[part], expected[part]) for part in parts(expected))
