"""Signatures: what the error of one block looks like, where no hypothesis explains it.

Each is read off two tensors: what a block made of right inputs, and what it should have made of them. Axes are those of
the taps: sentences first; heads second, where there are four; positions before the last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy import ndarray

from reference_numpy.config import TransformerConfig

FAR = 1e-9  # relative: beyond rounding in float64
SMALL = 1e-3  # relative: what is lost to rounding, in TensorFloat32 or bfloat16 too, is no more
BITS = {10: "TensorFloat32 or float16", 7: "bfloat16", 23: "float32", 24: "float32"}


def signatures(
    actual: ndarray,
    wanted: ndarray,
    config: TransformerConfig,
    weights: Mapping[str, ndarray] | None = None,
    far: float = FAR,
) -> list[str]:
    """Return what the error of a tensor looks like, the most telling first; none if nothing stands out.

    Args:
        actual: What the port made.
        wanted: What it should have made.
        config: The model's.
        weights: The model's, to recognise a vector that is added or missing.
        far: The relative error from which on an element counts as wrong.
    """
    if actual.shape != wanted.shape:
        return [_shape(actual, wanted)]
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    scale = float(np.abs(wanted).max(initial=0.0)) or 1.0
    if not np.isfinite(actual).all():
        return [_places(~np.isfinite(actual), "NaN or infinite")]
    wrong = np.abs(actual - wanted) > far * scale
    if not wrong.any():
        return []
    found: list[str] = []
    for look in (_factor, _offset, _permuted):
        found += look(actual, wanted, config, weights or {}, far)
    if not found:
        found += _rounded(actual, wanted, wrong)
    return [*found, *_where(wrong)]


def growth(errors: list[tuple[str, float]], tolerance: float) -> str:
    """Say how the error goes through the depth: from (block, error), in the order of computation."""
    known = [(name, error) for name, error in errors if 0.0 < error < math.inf]
    if len(known) < 3:
        return ""
    jumps = [(second / first, name) for (_, first), (name, second) in itertools.pairwise(known)]
    largest, where = max(jumps)
    if largest > 100.0:
        return f"the error jumps at {where}, {largest:.0e} times what it was before"
    if tolerance < known[-1][1] < SMALL:
        return f"the error grows slowly, from {known[0][1]:.0e} to {known[-1][1]:.0e}: rounding rather than a mistake"
    return ""


def _shape(actual: ndarray, wanted: ndarray) -> str:
    if sorted(actual.shape) == sorted(wanted.shape):
        for axes in itertools.permutations(range(wanted.ndim)):
            turned = wanted.transpose(axes)
            if turned.shape == actual.shape and np.allclose(actual, turned, rtol=1e-9, atol=0.0):
                return f"the axes are in the order {list(axes)}: the values are right"
    return f"the shape must be {list(wanted.shape)}: got {list(actual.shape)}"


def _factor(
    actual: ndarray, wanted: ndarray, config: TransformerConfig, weights: Mapping[str, ndarray], far: float
) -> Iterator[str]:
    """Look for a constant factor."""
    large = np.abs(wanted) > 1e-3 * np.abs(wanted).max()
    ratio = float(np.median(actual[large] / wanted[large])) if large.any() else 1.0
    if abs(ratio - 1.0) > far and _close(actual, ratio * wanted, far):
        yield f"everything is {ratio:.6g} times what it should be{_known_number(ratio, config)}"


def _known_number(ratio: float, config: TransformerConfig) -> str:
    numbers: dict[str, float] = {
        "sqrt(d_model)": math.sqrt(config.d_model),
        "sqrt(d_k)": math.sqrt(config.d_k),
        "sqrt(d_v)": math.sqrt(config.d_v),
        "d_k": config.d_k,
        "d_model": config.d_model,
        "num_heads": config.num_heads,
        "sqrt(d_model / d_k)": math.sqrt(config.d_model / config.d_k),
    }
    for words, value in numbers.items():
        for wording, number in ((words, value), (f"1 / {words}", 1.0 / value), (f"-{words}", -value)):
            if math.isclose(ratio, number, rel_tol=1e-6) and not math.isclose(number, 1.0):
                return f", which is {wording}"
    return ""


def _offset(
    actual: ndarray, wanted: ndarray, config: TransformerConfig, weights: Mapping[str, ndarray], far: float
) -> Iterator[str]:
    """Look for a vector that is added everywhere, or missing."""
    difference = actual - wanted
    if difference.ndim < 2:
        return
    if difference.ndim == 4:  # heads side by side again
        difference = difference.transpose(0, 2, 1, 3).reshape(difference.shape[0], difference.shape[2], -1)
    vector = difference.reshape(-1, difference.shape[-1])[0]
    if not np.abs(vector).any() or not _close(difference, np.broadcast_to(vector, difference.shape), far):
        return
    for parameter, value in weights.items():
        if value.shape == vector.shape:
            for sign, word in ((1.0, "added once too often"), (-1.0, "missing")):
                if _close(vector, sign * value.astype(np.float64), max(far, 1e-6)):
                    yield f"{parameter} is {word}"
                    return
    yield "the same vector is added at every position"


def _permuted(
    actual: ndarray, wanted: ndarray, config: TransformerConfig, weights: Mapping[str, ndarray], far: float
) -> Iterator[str]:
    """Look for the right values in the wrong places."""
    if actual.ndim == 4 and actual.shape[1] > 1:
        order = _matching(actual, wanted, 1, far)
        if order is not None:
            yield f"the heads are in the order {order}"
            return
    order = _matching(actual, wanted, actual.ndim - 1, far)
    if order is not None:
        yield f"the last axis is permuted: {_shortened(order)}"
        return
    if actual.ndim >= 3:
        order = _matching(actual, wanted, actual.ndim - 2, far)
        if order is not None:
            yield f"the positions are in the order {_shortened(order)}"
            return
    if _close(np.sort(actual, axis=None), np.sort(wanted, axis=None), far):
        yield "the values are right, in other places: axes swapped or reshaped without a transpose"


def _matching(actual: ndarray, wanted: ndarray, axis: int, far: float) -> list[int] | None:
    """Return the permutation along an axis that makes both the same, if it is not the identity."""
    mine, theirs = (np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in (actual, wanted))
    if len(mine) > 512:
        return None
    order = [int(np.abs(theirs - row).max(1).argmin()) for row in mine]
    if order == sorted(order) or len(set(order)) != len(order) or not _close(mine, theirs[order], far):
        return None
    return order


def _rounded(actual: ndarray, wanted: ndarray, wrong: ndarray) -> Iterator[str]:
    """Look for as many bits as a narrower type has."""
    error = float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)) if wanted.any() else math.inf
    if wrong.mean() > 0.5 and error < 2.0**-6:
        bits = round(-math.log2(error)) - 1
        close = min(BITS, key=lambda known: abs(known - bits))
        if abs(close - bits) <= 2:
            yield f"it is right to about {bits} bits: as if computed in {BITS[close]}"


def _where(wrong: ndarray) -> Iterator[str]:
    """Say which sentences, heads and positions."""
    if wrong.ndim < 3 or wrong.all():
        return
    sentences = np.asarray(wrong.any(axis=tuple(range(1, wrong.ndim))))
    if not sentences.all():
        yield f"sentences {_listed(sentences)} of {len(sentences)} are wrong, and no others: a mask, if they are padded"
    if wrong.ndim == 4:
        heads = np.asarray(wrong.any(axis=(0, 2, 3)))
        if not heads.all():
            yield f"heads {_listed(heads)} of {len(heads)} are wrong, and no others"
    positions = np.asarray(wrong.any(axis=tuple(axis for axis in range(wrong.ndim) if axis != wrong.ndim - 2)))
    if not positions.all():
        if not positions[0] and positions[1:].all():
            yield "only the first position is right: positions, or what a position may see"
        elif not positions[-1] and positions[:-1].all():
            yield "only the last position is right: what a position may see of those behind it"
        else:
            yield f"positions {_listed(positions)} of {len(positions)} are wrong, and no others"


def _places(wrong: ndarray, what: str) -> str:
    where = "; ".join(_where(wrong))
    return f"{int(wrong.sum())} of {wrong.size} values are {what}" + (f"; {where}" if where else "")


def _close(first: ndarray, second: ndarray, far: float) -> bool:
    return bool(np.abs(first - second).max(initial=0.0) <= far * max(float(np.abs(second).max(initial=0.0)), 1e-300))


def _listed(chosen: ndarray) -> str:
    return _shortened(np.flatnonzero(chosen).tolist())


def _shortened(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (", ..." if len(numbers) > 8 else "")
