"""Signatures: recognizable patterns in the error of a block, for any model.

The functions compare two tensors: the result that a block computed from correct inputs, and the correct result. Each
pattern has only a few possible causes. In contrast, an error of a given size or at a given position can have many
causes. Therefore, ``places`` lists the wrong positions but doesn't infer a cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from numpy import ndarray

SAME = 1e-9  # relative tolerance for float64 rounding errors
ENOUGH = 8  # minimum number of values in a pattern; fewer values may match a pattern by chance
NARROW = ("bfloat16", "float16", "float32")
LEAST_DOUBTFUL = 1e-3  # errors below this fraction of the tolerance are certainly caused by rounding
SMALLEST_RATE = 0.005  # smallest dropout rate that is recognized
LEAST = 0.02  # minimum fraction of values or vectors that must be dropped, and minimum fraction that must be kept


def is_close(actual: ndarray, wanted: ndarray, far: float = SAME) -> bool:
    """Return whether all errors are at most ``far``, relative to the largest element of the correct tensor."""
    if actual.shape != wanted.shape:
        return False
    largest = max(float(np.abs(wanted).max(initial=0.0)), 1e-300)
    return bool(np.abs(actual - wanted).max(initial=0.0) <= far * largest)


def written(factor: float) -> str:
    """Return a factor as text, with enough digits to distinguish it from 1."""
    return next(text for digits in (6, 9, 12, 17) if (text := f"{factor:.{digits}g}") != "1" or digits == 17)


def without_heads(array: ndarray) -> ndarray:
    """Reshape an array [B, H, L, d] to [B, L, H * d], and return arrays without a head axis unchanged."""
    return array.swapaxes(1, 2).reshape(*array.shape[::2], -1) if array.ndim == 4 else array


def places(actual: ndarray, wanted: ndarray, far: float, axes: Mapping[str, int]) -> list[str]:
    """Report at which indices of some axes a tensor is wrong.

    If the tensor is wrong at all indices of an axis, the result doesn't mention the axis.

    Args:
        actual: The port's result.
        wanted: The correct result.
        far: Relative error above which an element is wrong.
        axes: The axes by name, for example ``positions``. If a name contains ``{}``, the range of indices replaces it.
    """
    if actual.shape != wanted.shape:
        return []
    errors, doubtful = (
        wrong(np.asarray(actual, np.float64), np.asarray(wanted, np.float64), least)
        for least in (far, far * LEAST_DOUBTFUL if far <= SAME else far)
    )
    found = []
    for what, axis in axes.items():
        others = tuple(other for other in range(errors.ndim) if other != axis)
        of_axis = np.asarray(errors.any(axis=others))
        if not np.array_equal(of_axis, doubtful.any(axis=others)):  # some errors may be due to rounding
            continue
        if of_axis.any() and not of_axis.all():
            listed = shortened(np.flatnonzero(of_axis).tolist())
            span = f"0 to {len(of_axis) - 1}"
            among = what.format(span) if "{" in what else f"{what} {span}"
            found.append(f"among {among}, only {listed} differ{'s' * int(of_axis.sum() == 1)}")
    return found


def wrong(actual: ndarray, wanted: ndarray, far: float) -> ndarray:
    """Return a mask that selects the elements whose error exceeds ``far``, relative to the largest correct value."""
    scale = float(np.abs(wanted).max(initial=0.0, where=np.isfinite(wanted))) or 1.0
    return ~(np.abs(actual - wanted) <= far * scale)


def filled(actual: ndarray, wanted: ndarray, far: float) -> str:
    """Report that some elements have the same very low value, as in masked scores, and that all others are correct."""
    errors = wrong(actual, wanted, far)
    values = np.unique(actual[errors])
    if len(values) != 1 or errors.sum() < ENOUGH or errors.all() or not values[0] < -10.0 * np.abs(wanted).max():
        return ""
    return f"{int(errors.sum())} values are {values[0]:g}, as if they were masked, and all others are correct"


def is_distribution(array: ndarray, axis: int = -1, far: float = 1e-6) -> bool:
    """Return whether no value is negative, and all sums along an axis are 1, or 0 if everything is masked."""
    sums = array.sum(axis)
    return not (array < 0.0).any() and bool(np.all((sums == 0.0) | (np.abs(sums - 1.0) < far)))


def masked(actual: ndarray, wanted: ndarray) -> Iterator[str]:
    """Report which attention weights [..., L, M] are zero in only one of the two tensors."""
    if not is_distribution(wanted):
        return
    forbidden, hidden = (wanted == 0.0) & (actual != 0.0), (wanted > 1e-30) & (actual == 0.0)
    if forbidden.any():
        most = f"up to {actual[forbidden].max():.2g}"
        yield f"{int(forbidden.sum())} keys that the mask forbids get nonzero weight, {most}{_offset_of(forbidden)}"
    if hidden.any():
        yield f"{int(hidden.sum())} keys that the mask allows get zero weight{_offset_of(hidden)}"


def _offset_of(keys: ndarray) -> str:
    """Return a phrase for the distance between the selected keys and their queries.

    ``keys`` is a mask [..., L, M] that is True for the selected keys of each query. The function returns an empty
    string if the distance varies, or if L and M differ.
    """
    *_, query, key = np.nonzero(keys)
    offsets = np.unique(key - query)
    if keys.shape[-2] != keys.shape[-1] or len(offsets) != 1:
        return ""
    if not offsets[0]:
        return ": each of these keys is at the position of its query"
    side = "after" if offsets[0] > 0 else "before"
    return f": each is {abs(offsets[0])} position{'s' * int(abs(offsets[0]) > 1)} {side} its query"


def narrowed(actual: ndarray, wanted: ndarray) -> str:
    """Return a message if a tensor has only the precision of a narrower dtype, or an empty string otherwise."""
    if actual.shape != wanted.shape:
        return ""
    # Zeros and rounding noise can be represented in any dtype.
    telling = np.abs(actual) > SAME * np.abs(wanted).max(initial=0.0, where=np.isfinite(wanted))
    if telling.sum() < ENOUGH or not np.isfinite(actual).all():
        return ""
    with np.errstate(over="ignore"):
        for dtype in NARROW:
            if np.dtype(dtype).itemsize < actual.dtype.itemsize and is_of(actual, dtype) and not is_of(wanted, dtype):
                return f"every value has only {dtype} precision: the port rounds to {dtype} here"
    return ""


def is_of(array: ndarray, dtype: str) -> bool:
    """Return whether a dtype can represent every value of an array exactly."""
    return bool(np.array_equal(array.astype(dtype).astype(array.dtype), array))


def misshapen(actual: ndarray, wanted: ndarray) -> str:
    """Describe a tensor whose shape is wrong."""
    if sorted(actual.shape) == sorted(wanted.shape):
        for axes in itertools.permutations(range(wanted.ndim)):
            turned = wanted.transpose(axes)
            if turned.shape == actual.shape and np.allclose(actual, turned, rtol=1e-9, atol=0.0):
                return f"the values are correct, but the axes are in the order {list(axes)}"
    return f"the shape must be {list(wanted.shape)}: got {list(actual.shape)}"


def dropped(actual: ndarray, wanted: ndarray, far: float) -> Iterator[str]:
    """Report signs of dropout: some values are zero or lack terms of a sum, and all other values are scaled up."""
    for width, words in ((1, "values"), (actual.shape[-1], "vectors")):
        values, right = actual.reshape(-1, width), wanted.reshape(-1, width)
        size = np.abs(right).max(-1)
        values, right = (vectors[size > 1e-3 * size.max()] for vectors in (values, right))
        multiple, scaled = _scaled_up(values, right, far * np.abs(wanted).max())
        others = values[~scaled]
        rate = 1.0 - 1.0 / multiple
        if rate < SMALLEST_RATE or min(scaled.sum(), len(others)) < max(ENOUGH, LEAST * len(values)):
            continue
        if abs(rate - round(rate, 3)) > 1e-6:  # dropout rates are round numbers, so this has a different cause
            continue
        if words == "values" and others.any():
            continue
        left = "zero, as after dropout" if words == "values" else "not, as in sums of values after dropout"
        count = f"{int(scaled.sum())} of {len(values)} {words}"
        yield f"{count} are {multiple:.6g} = 1 / (1 - {rate:.3g}) times the correct ones, and the others are {left}"
        return


def _scaled_up(values: ndarray, right: ndarray, noise: float) -> tuple[float, ndarray]:
    """Return a factor greater than 1 that scales many of the vectors [N, width], and a mask that selects these vectors.

    If no vector is too large, the factor is 1 and the mask selects the correct vectors.
    """
    size = np.square(right).sum(-1)
    factors = (values * right).sum(-1) / size
    is_multiple = np.abs(values - factors[:, None] * right).max(-1) <= noise
    larger = factors[is_multiple & (factors > 1.0 + SMALLEST_RATE)]
    factor = float(np.median(larger)) if larger.size else 1.0
    return factor, is_multiple & np.isclose(factors, factor, 1e-6, 0.0)


def factor(actual: ndarray, wanted: ndarray, far: float, in_words: Callable[[float], str]) -> Iterator[str]:
    """Report that all values are zero, or that all values are scaled by the same factor.

    ``in_words`` returns the words that follow a factor, for example ", a factor of sqrt(d_k)".
    """
    if not actual.any():
        yield "all values are zero"
        return
    large = np.abs(wanted) > 1e-3 * np.abs(wanted).max()
    ratio = float(np.median(actual[large] / wanted[large])) if large.any() else 1.0
    if abs(ratio - 1.0) > far and is_close(actual, ratio * wanted, far):
        yield f"all values are {written(ratio)} times the correct ones{in_words(ratio)}"


def offset(actual: ndarray, wanted: ndarray, far: float, weights: Mapping[str, ndarray]) -> Iterator[str]:
    """Report a vector, such as a bias, that is missing at every position or is added once too often."""
    difference = actual - wanted
    if difference.ndim < 2 or difference.shape[-1] == difference.size:
        return
    difference = without_heads(difference)
    vector = difference.reshape(-1, difference.shape[-1])[0]
    if not np.abs(vector).any() or not is_close(difference, np.broadcast_to(vector, difference.shape), far):
        return
    for parameter, value in weights.items():
        if value.shape == vector.shape:
            for sign, word in ((1.0, "added one time too many"), (-1.0, "missing")):
                if is_close(vector, sign * value.astype(np.float64), max(far, 1e-6)):
                    yield f"{parameter} is {word}"
                    return
    yield "the same vector is added at every position"


def permuted(actual: ndarray, wanted: ndarray, far: float) -> Iterator[str]:
    """Report that the values are correct but in the wrong order, for example because the heads are permuted."""
    if actual.ndim == 4 and actual.shape[1] > 1 and (order := matching(actual, wanted, 1, far)):
        yield f"the heads are in the order {order}"
    elif order := matching(actual, wanted, actual.ndim - 1, far):
        yield f"the last axis is permuted: {shortened(order)}"
    elif actual.ndim >= 3 and (order := matching(actual, wanted, actual.ndim - 2, far)):
        yield f"the positions are in the order {shortened(order)}"
    elif is_close(np.sort(actual, axis=None), np.sort(wanted, axis=None), far):
        yield "the values are correct, but in different places, as after a reshape without a transpose"


def matching(actual: ndarray, wanted: ndarray, axis: int, far: float) -> list[int]:
    """Return the permutation along an axis that makes the tensors equal, or [] if there is none or it is trivial."""
    mine, theirs = (np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in (actual, wanted))
    if len(mine) > 512:
        return []
    order = [int(np.abs(theirs - row).max(1).argmin()) for row in mine]
    if order == sorted(order) or len(set(order)) != len(order) or not is_close(mine, theirs[order], far):
        return []
    return order


def shortened(numbers: list[int]) -> str:
    """Return at most eight numbers as text."""
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (", ..." if len(numbers) > 8 else "")
