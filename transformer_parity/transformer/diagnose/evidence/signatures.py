"""Signatures: recognizable patterns in the error of a block, for errors that no candidate explains.

The functions compare two tensors: the result that a block computed from correct inputs, and the correct result. Each
pattern has only a few possible causes. In contrast, an error of a given size or at a given position can have many
causes. Therefore, ``places`` lists the wrong positions but doesn't infer a cause. Tensors have the same axes as their
taps: the first axis is the sentence, the second axis is the head if there are four axes, and the second-to-last axis is
the position.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.evidence.closeness import (
    SAME,
    factor_in_words,
    is_close,
    without_heads,
    written,
)
from transformer_spec.config import TransformerConfig

ENOUGH = 8  # minimum number of values in a pattern; fewer values may match a pattern by chance
NARROW = ("bfloat16", "float16", "float32")
LEAST_DOUBTFUL = 1e-3  # errors below this fraction of the tolerance are certainly caused by rounding
SMALLEST_RATE = 0.005  # smallest dropout rate that is recognized
LEAST = 0.02  # minimum fraction of values or vectors that must be dropped, and minimum fraction that must be kept


def signatures(
    actual: ndarray,
    wanted: ndarray,
    config: TransformerConfig,
    weights: Mapping[str, ndarray] | None = None,
    far: float = SAME,
    case: Case | None = None,
) -> list[str]:
    """Return descriptions of all recognizable patterns in the error of a tensor, starting with the most specific one.

    Args:
        actual: The port's result.
        wanted: The correct result.
        config: Config of the model.
        weights: Weights of the model, used to recognize a vector that is added or missing.
        far: Relative error above which an element is wrong.
        case: The case whose batch sizes may explain a wrong factor; None if the tensor is not a sum over the batch.
    """
    if actual.shape != wanted.shape:
        return [_shape(actual, wanted)]
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    if np.isfinite(wanted).all() and (filled := _filled(actual, wanted, far)):
        return [filled]
    if not np.isfinite(actual).all():
        wrong = ~np.isfinite(actual)
        return [f"{int(wrong.sum())} of {wrong.size} values are NaN or infinite"]
    if actual.size < ENOUGH or not _wrong(actual, wanted, far).any():
        return []
    found = [*_masked(actual, wanted), *_dropped(actual, wanted, far), *_factor(actual, wanted, far, config, case)]
    return [*found, *_offset(actual, wanted, far, weights or {}), *_permuted(actual, wanted, far)]


def places(actual: ndarray, wanted: ndarray, far: float = SAME) -> list[str]:
    """Report which sentences, heads, and positions of a tensor are wrong.

    For example, if all heads are wrong, the result doesn't mention heads.
    """
    if actual.shape != wanted.shape or actual.ndim < 3:
        return []
    wrong, doubtful = (
        _wrong(np.asarray(actual, np.float64), np.asarray(wanted, np.float64), least)
        for least in (far, far * LEAST_DOUBTFUL if far <= SAME else far)
    )
    axes = {"sentences": 0, "heads": 1, "positions": wrong.ndim - 2}
    if wrong.ndim == 3:
        del axes["heads"]
    found = []
    for what, axis in axes.items():
        others = tuple(other for other in range(wrong.ndim) if other != axis)
        of_axis = np.asarray(wrong.any(axis=others))
        if not np.array_equal(of_axis, doubtful.any(axis=others)):  # some errors may be due to rounding
            continue
        if of_axis.any() and not of_axis.all():
            listed = _shortened(np.flatnonzero(of_axis).tolist())
            found.append(f"among {what} 0 to {len(of_axis) - 1}, only {listed} differ{'s' * int(of_axis.sum() == 1)}")
    return found


def _wrong(actual: ndarray, wanted: ndarray, far: float) -> ndarray:
    scale = float(np.abs(wanted).max(initial=0.0, where=np.isfinite(wanted))) or 1.0
    return ~(np.abs(actual - wanted) <= far * scale)


def _filled(actual: ndarray, wanted: ndarray, far: float) -> str:
    """Report that some elements have the same very low value, as in masked scores, and that all others are correct."""
    wrong = _wrong(actual, wanted, far)
    values = np.unique(actual[wrong])
    if len(values) != 1 or wrong.sum() < ENOUGH or wrong.all() or not values[0] < -10.0 * np.abs(wanted).max():
        return ""
    return f"{int(wrong.sum())} values are {values[0]:g}, as if they were masked, and all others are correct"


def _masked(actual: ndarray, wanted: ndarray) -> Iterator[str]:
    """Report which attention weights [B, H, L, M] are zero in only one of the two tensors."""
    sums = wanted.sum(-1)
    if wanted.ndim != 4 or (wanted < 0.0).any() or not np.all((sums == 0.0) | (np.abs(sums - 1.0) < 1e-6)):
        return
    forbidden, hidden = (wanted == 0.0) & (actual != 0.0), (wanted > 1e-30) & (actual == 0.0)
    if forbidden.any():
        most = f"up to {actual[forbidden].max():.2g}"
        yield f"{int(forbidden.sum())} keys that the mask forbids get nonzero weight, {most}{_offset_of(forbidden)}"
    if hidden.any():
        yield f"{int(hidden.sum())} keys that the mask allows get zero weight{_offset_of(hidden)}"


def _offset_of(keys: ndarray) -> str:
    """Return a phrase for the distance between the selected keys and their queries.

    ``keys`` is a mask [B, H, L, M] that is True for the selected keys of each query. The function returns an empty
    string if the distance varies, or if L and M differ.
    """
    _, _, query, key = np.nonzero(keys)
    offsets = np.unique(key - query)
    if keys.shape[2] != keys.shape[3] or len(offsets) != 1:
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


def _shape(actual: ndarray, wanted: ndarray) -> str:
    if sorted(actual.shape) == sorted(wanted.shape):
        for axes in itertools.permutations(range(wanted.ndim)):
            turned = wanted.transpose(axes)
            if turned.shape == actual.shape and np.allclose(actual, turned, rtol=1e-9, atol=0.0):
                return f"the values are correct, but the axes are in the order {list(axes)}"
    return f"the shape must be {list(wanted.shape)}: got {list(actual.shape)}"


def _dropped(actual: ndarray, wanted: ndarray, far: float) -> Iterator[str]:
    """Report signs of dropout: some values are zero or lack terms of a sum, and all other values are scaled up."""
    for width, words in ((1, "values"), (actual.shape[-1], "vectors")):
        values, right = actual.reshape(-1, width), wanted.reshape(-1, width)
        size = np.abs(right).max(-1)
        values, right = (vectors[size > 1e-3 * size.max()] for vectors in (values, right))
        factor, scaled = _scaled_up(values, right, far * np.abs(wanted).max())
        others = values[~scaled]
        rate = 1.0 - 1.0 / factor
        if rate < SMALLEST_RATE or min(scaled.sum(), len(others)) < max(ENOUGH, LEAST * len(values)):
            continue
        if abs(rate - round(rate, 3)) > 1e-6:  # dropout rates are round numbers, so this has a different cause
            continue
        if words == "values" and others.any():
            continue
        left = "zero, as after dropout" if words == "values" else "not, as in sums of values after dropout"
        count = f"{int(scaled.sum())} of {len(values)} {words}"
        yield f"{count} are {factor:.6g} = 1 / (1 - {rate:.3g}) times the correct ones, and the others are {left}"
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


def _factor(
    actual: ndarray, wanted: ndarray, far: float, config: TransformerConfig, case: Case | None
) -> Iterator[str]:
    """Report that all values are zero, or that all values are scaled by the same factor."""
    if not actual.any():
        yield "all values are zero"
        return
    large = np.abs(wanted) > 1e-3 * np.abs(wanted).max()
    ratio = float(np.median(actual[large] / wanted[large])) if large.any() else 1.0
    if abs(ratio - 1.0) > far and is_close(actual, ratio * wanted, far):
        yield f"all values are {written(ratio)} times the correct ones{factor_in_words(ratio, config, case)}"


def _offset(actual: ndarray, wanted: ndarray, far: float, weights: Mapping[str, ndarray]) -> Iterator[str]:
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


def _permuted(actual: ndarray, wanted: ndarray, far: float) -> Iterator[str]:
    """Report that the values are correct but in the wrong order, for example because the heads are permuted."""
    if actual.ndim == 4 and actual.shape[1] > 1 and (order := _matching(actual, wanted, 1, far)):
        yield f"the heads are in the order {order}"
    elif order := _matching(actual, wanted, actual.ndim - 1, far):
        yield f"the last axis is permuted: {_shortened(order)}"
    elif actual.ndim >= 3 and (order := _matching(actual, wanted, actual.ndim - 2, far)):
        yield f"the positions are in the order {_shortened(order)}"
    elif is_close(np.sort(actual, axis=None), np.sort(wanted, axis=None), far):
        yield "the values are correct, but in different places, as after a reshape without a transpose"


def _matching(actual: ndarray, wanted: ndarray, axis: int, far: float) -> list[int]:
    """Return the permutation along an axis that makes the tensors equal, or [] if there is none or it is trivial."""
    mine, theirs = (np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in (actual, wanted))
    if len(mine) > 512:
        return []
    order = [int(np.abs(theirs - row).max(1).argmin()) for row in mine]
    if order == sorted(order) or len(set(order)) != len(order) or not is_close(mine, theirs[order], far):
        return []
    return order


def _shortened(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (", ..." if len(numbers) > 8 else "")
