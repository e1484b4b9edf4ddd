"""Recognize the kind of a bug from the tensors of one block, without any knowledge of the model.

Each function tests a hypothesis, such as "both tensors are activations of the same earlier tensor". A hypothesis must
explain the correct tensor and the port's tensor. If several hypotheses do, all of them are returned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy import ndarray

from transformer_parity.engine import signatures
from transformer_parity.engine.signatures import ENOUGH, SAME, is_close, is_distribution, narrowed, shortened, written
from transformer_parity.engine.signatures import wrong as is_wrong
from transformer_parity.pairs.diagnose.formulas import (
    EXACT,
    LEFT,
    Mismatch,
    Named,
    Recognized,
    activations,
    chosen,
    in_shape,
    is_float,
    left,
    looked_up,
    rotary,
    selected,
)
from transformer_parity.pairs.diagnose.norms import norms

KINDS = (
    *("mask", "axis", "training mode", "sign", "factor", "offset", "transposed", "shifted", "order"),
    *("rotary pairs", "rotary angle", "epsilon", "norm", "activation", "swapped", "narrower dtype"),
)
Arrays = Mapping[str, ndarray]
NEAREST = 12  # maximum number of earlier tensors that are tested
LOW = -1e3  # masked scores are below this value


def recognize(
    actual: ndarray, wanted: ndarray, earlier: Arrays, weights: Arrays, far: float, exact: float = EXACT
) -> list[Recognized]:
    """Return the kinds of bugs that explain the error of a tensor, starting with the most specific kind.

    Args:
        actual: The tensor that the port computes from correct inputs of its block, in the dtype of the port.
        wanted: The correct tensor, in float64.
        earlier: The inputs and the correct tensors before this one, in the order of computation.
        weights: The weights of the model.
        far: Relative error above which an element is wrong.
        exact: Relative tolerance for formulas that must reproduce the correct tensor.
    """
    if actual.size < ENOUGH or np.isnan(wanted).any() or np.isnan(actual).any():
        return []
    right, mine = np.asarray(wanted, np.float64), np.asarray(actual, np.float64)
    if right.shape != mine.shape:
        return list(_reshaped(mine, right, far))
    fills = list(_fills(mine, right, far))
    low = _low(right)
    if np.array_equal(low, _low(mine)) and not low.all():  # masked scores would hide errors of the others
        right, mine = np.where(low, 0.0, right), np.where(low, 0.0, mine)
    if fills or not is_wrong(mine, right, far).any():
        return fills
    floats = {name: value for name, value in weights.items() if value.dtype.kind == "f"}
    block = Mismatch(mine, right, *_earlier(earlier, right), floats, far, exact)
    if not (words := narrowed(actual, right)):
        return _kinds(block)
    narrow = Recognized("narrower dtype", words)
    if found := _kinds(block):  # all values may have the precision of the weights, which are float32 numbers
        return found
    dtype = next(dtype for dtype in signatures.NARROW if dtype in words)
    block = replace(block, far=max(far, 8.0 * 2.0 ** -{"bfloat16": 8, "float16": 11, "float32": 24}[dtype]))
    if not is_wrong(mine, right, block.far).any():
        return [narrow]
    return [*found, narrow] if (found := _kinds(block)) else []


def _earlier(earlier: Arrays, wanted: ndarray) -> tuple[Named, Named]:
    """Return the nearest earlier tensors with the shape of the correct tensor, and the nearest ones of any shape."""
    same: Named = []
    near: Named = []
    for name, value in reversed(list(earlier.items())):
        if len(near) < NEAREST and is_float(value):
            near.append((name, np.asarray(value, np.float64)))
        if len(same) < NEAREST and value.size == wanted.size and is_float(value):
            same += [(name, found) for found in in_shape(np.asarray(value, np.float64), wanted.shape)]
    return same, near


def _kinds(block: Mismatch) -> list[Recognized]:
    """Return the kinds of bugs that explain an error."""
    if not (np.isfinite(block.wanted).all() and np.isfinite(block.actual).all()):
        return []
    with np.errstate(all="ignore"):
        found = [*_zeros(block), *_dropped(block), *_multiples(block), *_moved(block)]
        found = found or [*_attention(block)]
        if not found:
            found = [*looked_up(block), *_sums(block), *selected(block), *rotary(block)]
            found += [*norms(block), *activations(block)]
    return list(dict.fromkeys(found))


def places(actual: ndarray, wanted: ndarray, far: float = SAME) -> list[str]:
    """Report at which indices of each axis a tensor is wrong, except for axes at which all indices are wrong."""
    return signatures.places(actual, wanted, far, {f"indices {{}} of axis {axis}": axis for axis in range(wanted.ndim)})


def _reshaped(actual: ndarray, wanted: ndarray, far: float) -> Iterator[Recognized]:
    for axes in itertools.permutations(range(wanted.ndim if sorted(actual.shape) == sorted(wanted.shape) else 0)):
        if axes and is_close(actual, wanted.transpose(axes), far):
            yield Recognized("transposed", f"the values are correct, but the axes are in the order {list(axes)}")
            return
    if actual.size == wanted.size and is_close(actual.ravel(), wanted.ravel(), far):
        shapes = f"{list(actual.shape)} instead of {list(wanted.shape)}"
        yield Recognized("transposed", f"the values are correct, but the shape is {shapes}")


def _low(array: ndarray) -> ndarray:
    """Return a mask that selects masked scores."""
    return np.asarray(array < LOW * max(1.0, float(array.max())))


def _fills(actual: ndarray, wanted: ndarray, far: float) -> Iterator[Recognized]:
    """Recognize masked scores, such as -inf or -1e9, if all other scores are correct."""
    mine, theirs = _low(actual), _low(wanted)
    if not (mine.any() or theirs.any()) or mine.all() or theirs.all():
        return
    others = ~(mine | theirs)
    if not np.isfinite(actual[others]).all() or not is_close(actual[others], wanted[others], far):
        return
    for only, array, words in (
        (mine & ~theirs, actual, "are masked, but"),
        (theirs & ~mine, wanted, "aren't masked, but"),
    ):
        if only.any():
            but = "must not be" if words.startswith("are ") else "must be"
            yield Recognized(
                "mask", f"{int(only.sum())} values {words} {but} (masked values are about {array.min():g})"
            )
    if np.array_equal(mine, theirs) and not is_close(np.nan_to_num(actual[mine]), np.nan_to_num(wanted[mine]), 0.1):
        low = f"{actual[mine].max():g} instead of {wanted[mine].max():g}"
        yield Recognized("mask", f"masked values are about {low}")


def _zeros(block: Mismatch) -> Iterator[Recognized]:
    """Recognize vectors that are zero in only one of the tensors, if all others are correct."""
    actual, wanted = block.actual, block.wanted
    for axis in {actual.ndim - 1, min(1, actual.ndim - 1)}:
        mine, theirs = (~array.any(axis, keepdims=True) for array in (actual, wanted))
        if actual.shape[axis] < 4 or np.array_equal(mine, theirs) or (mine | theirs).all():
            continue
        if block.explains(np.where(mine, 0.0, np.where(theirs, actual, wanted))):
            for only, where in ((mine & ~theirs, "the port"), (theirs & ~mine, "the original")):
                if only.any():
                    yield Recognized("mask", f"{int(only.sum())} vectors along axis {axis} are zero only in {where}")
            return


def _dropped(block: Mismatch) -> Iterator[Recognized]:
    kept, alive = block.actual != 0.0, block.wanted != 0.0
    rate = round(1.0 - 1.0 / max(_ratio(block.actual[kept], block.wanted[kept]), 1.0), 3)
    lost = int((alive & ~kept).sum())
    is_likely = 0.005 <= rate < 0.95 and lost >= max(ENOUGH, 0.02 * alive.sum())
    if is_likely and block.explains(np.where(kept, block.wanted / (1.0 - rate), 0.0)):
        words = f"{lost} of {alive.sum()} values are zero, and the others are 1 / (1 - {rate:g}) times the correct ones"
        yield Recognized("training mode", f"{words}, as after dropout")
        return
    for words in signatures.dropped(block.actual, block.wanted, block.far):
        yield Recognized("training mode", words)


def _attention(block: Mismatch) -> Iterator[Recognized]:
    """Recognize another mask, axis, or scale of a softmax from the probabilities."""
    actual, wanted, far = block.actual, block.wanted, max(block.far, 1e-6)
    axes = [axis for axis in range(wanted.ndim) if wanted.shape[axis] > 1]
    theirs = [axis for axis in axes if is_distribution(wanted, axis)]
    mine = [axis for axis in axes if is_distribution(actual, axis, far)]
    if len(theirs) == 1 and mine and theirs[0] not in mine:
        yield Recognized("axis", f"the softmax is over axis {mine[-1]} instead of axis {theirs[0]}")
    if len(theirs) == 1 and not mine and block.explains(wanted * actual.sum(theirs[0], keepdims=True)):
        yield Recognized("factor", f"the values along axis {theirs[0]} don't sum to 1")
    for axis in set(theirs) & set(mine):
        port, right = np.moveaxis(actual, axis, -1), np.moveaxis(wanted, axis, -1)
        cleaned = np.where((right == 0.0) & (port <= block.far), 0.0, port)
        masked = list(signatures.masked(cleaned, np.where((port == 0.0) & (right <= block.far), 0.0, right)))
        yield from (Recognized("mask", words) for words in masked)
        both = (port > block.far) & (right > block.far)
        logs = [np.log(array, out=np.zeros_like(array), where=both) for array in (port, right)]
        means = [log.sum(-1, keepdims=True) / np.maximum(both.sum(-1, keepdims=True), 1) for log in logs]
        centered = [np.where(both, log - mean, 0.0) for log, mean in zip(logs, means, strict=True)]
        ratio = float(np.vdot(centered[1], centered[0]) / max(float(np.vdot(centered[1], centered[1])), 1e-300))
        scaled = np.where(right > 0.0, right, 1.0) ** ratio * (right > 0.0)
        scaled /= np.maximum(scaled.sum(-1, keepdims=True), 1e-300)
        if not masked and left(port, right, scaled, block.far) <= LEFT:
            words = (
                f"the scores before the softmax are {written(ratio)} times the correct ones{_in_words(block, ratio)}"
            )
            yield Recognized("sign" if is_close(np.array(ratio), np.array(-1.0), block.far) else "factor", words)


def _ratio(actual: ndarray, wanted: ndarray) -> float:
    large = np.abs(wanted) > 1e-3 * np.abs(wanted).max(initial=0.0)
    return float(np.median(actual[large] / wanted[large])) if large.any() else 1.0


def _in_words(block: Mismatch, ratio: float) -> str:
    """Return words such as ", which is 1 / sqrt(8)" if a factor is a simple function of the size of an axis."""
    arrays = [block.wanted, *(value for _, value in block.near), *itertools.islice(block.weights.values(), 200)]
    sizes = {size for array in arrays for size in array.shape}
    sizes |= {block.wanted.shape[-1] // n for n in range(1, 65) if block.wanted.shape[-1] % n == 0}
    sign, ratio = "-" * (ratio < 0.0), abs(ratio)
    forms = {"1 / {}": 1.0 / ratio, "sqrt({})": ratio**2, "1 / sqrt({})": ratio**-2}
    known = [
        sign + words.format(round(size))
        for words, size in forms.items()
        if round(size) in sizes
        and round(size) > 2
        and math.isclose(size, round(size), rel_tol=max(1e-6, 0.5 * block.far))
    ]
    return f", which is {' or '.join(known)}" if known else ""


def _multiples(block: Mismatch) -> Iterator[Recognized]:
    """Recognize a factor that is the same everywhere, or that depends only on the channel."""
    actual, wanted = block.actual, block.wanted
    if not actual.any():
        yield Recognized("factor", "all values are zero")
        return
    ratio = _ratio(actual, wanted)
    if block.explains(ratio * wanted):
        words = f"all values are {written(ratio)} times the correct ones{_in_words(block, ratio)}"
        is_sign = abs(ratio + 1.0) <= block.far
        yield Recognized("sign", "all values have the wrong sign") if is_sign else Recognized("factor", words)
        return
    for axis in {wanted.ndim - 1, min(1, wanted.ndim - 1)}:
        others = tuple(other for other in range(wanted.ndim) if other != axis)
        if wanted.size < 4 * wanted.shape[axis] or wanted.shape[axis] < 2:
            continue
        square = np.square(wanted).sum(others, keepdims=True)
        ratios = (actual * wanted).sum(others, keepdims=True) / np.where(square > 0.0, square, 1.0)
        if not block.explains(ratios * wanted):
            continue
        ratios = ratios.ravel()
        if is_close(np.abs(ratios), np.ones_like(ratios), block.far):
            where = shortened(np.flatnonzero(ratios < 0.0).tolist())
            yield Recognized("sign", f"the sign is wrong at some indices of axis {axis}: {where}")
        for name, value in block.vectors(len(ratios)).items():
            for kind, words, vector in (
                ("factor", f"the values are multiplied by {name} one time too many", value),
                ("factor", f"the values aren't multiplied by {name}", 1.0 / value),
                ("norm", f"the scale is {name} instead of 1 + {name}", value / (1.0 + value)),
                ("norm", f"the scale is 1 + {name} instead of {name}", (1.0 + value) / value),
            ):
                if is_close(ratios, vector, max(block.far, 1e-6)) and np.ptp(ratios) > 1e-3:
                    yield Recognized(kind, words)


def _sums(block: Mismatch) -> Iterator[Recognized]:
    """Recognize a vector or an earlier tensor that is missing or added."""
    actual, wanted = block.actual, block.wanted
    difference, last = actual - wanted, wanted.ndim - 1
    if block.explains(wanted + difference.mean()):
        yield Recognized("offset", f"{difference.mean():.6g} is added to every value")
        return
    for kept in dict.fromkeys([(last,), (min(1, last),), *([(1, 3), (2, 3)] if last == 3 else [])]):
        vector = difference.mean(tuple(axis for axis in range(last + 1) if axis not in kept), keepdims=True)
        if wanted.size < 3 * vector.size or not block.explains(wanted + vector):
            continue
        known = {f"{name} is added one time too many": value for name, value in block.vectors(vector.size).items()}
        known |= {f"{name} is missing": -value for name, value in block.vectors(vector.size).items()}
        for (one, first), (two, second) in itertools.permutations(block.vectors(vector.size).items(), 2):
            known[f"{two} is added instead of {one}"] = second - first
        noise = max(block.far * np.abs(wanted).max(), 1e-6 * np.abs(vector).max())
        matches = [words for words, value in known.items() if np.abs(vector.ravel() - value).max() <= noise]
        same = f"the same vector is added at every index of the axes other than {' and '.join(map(str, kept))}"
        yield Recognized("offset", " or ".join(matches) or same)
        return
    if last == 2 and len(wanted) > 1 and block.explains(wanted + difference.mean(0)):
        for name, table in block.weights.items():
            length, width = wanted.shape[1:]
            for row in range(1, min(4, len(table) - length + 1) if table.ndim == 2 and table.shape[1] == width else 0):
                if block.explains(wanted + table[row : row + length] - table[:length]):
                    yield Recognized("shifted", f"{name} is read from row {row} instead of row 0")
    some = np.unravel_index(chosen(wanted.size, 4096), wanted.shape)
    mine, theirs = actual[some], wanted[some]
    for name, x in block.same:
        for base, unit, words in ((wanted, x, ""), (x, wanted - x, f"after subtracting {name}, ")):
            vector = unit[some]
            ratio = float(np.vdot(vector, mine - base[some]) / max(float(np.vdot(vector, vector)), 1e-300))
            is_likely = left(mine, theirs, base[some] + ratio * vector, block.far) <= LEFT
            if abs(ratio) < 1e-3 or not is_likely or not block.explains(base + ratio * unit):
                continue
            if words:
                words += f"all values are {written(ratio)} times the correct ones{_in_words(block, ratio)}"
                yield Recognized("factor", words)
                continue
            usual = {-1.0: f"{name} is missing", 1.0: f"{name} is added one time too many"}
            yield Recognized("offset", usual.get(round(ratio, 3), f"{written(ratio)} times {name} is added"))
            break


def _moved(block: Mismatch) -> Iterator[Recognized]:
    """Recognize correct values at wrong indices."""
    actual, wanted, far, shape = block.actual, block.wanted, block.far, block.wanted.shape
    for axes in itertools.permutations(range(wanted.ndim)) if wanted.ndim <= 5 else []:
        if (
            sorted(axes) != list(axes)
            and wanted.transpose(axes).shape == shape
            and block.explains(wanted.transpose(axes))
        ):
            yield Recognized("transposed", f"the values are correct, but the axes are in the order {list(axes)}")
            return
    for axis, ahead in itertools.product(range(wanted.ndim), (False, True)):
        theirs, mine = (np.moveaxis(array, axis, 0)[:: -1 if ahead else 1] for array in (wanted, actual))
        if len(mine) > 2 and mine[1:].size >= ENOUGH and left(mine[1:], theirs[1:], theirs[:-1], far) <= LEFT:
            filled = "zeros" if not mine[0].any() else "rolled" if is_close(mine[0], theirs[-1], far) else "not shifted"
            words = f"along axis {axis}, index t has the value of index t {'+' if ahead else '-'} 1"
            yield Recognized("shifted", f"{words} (the {'last' if ahead else 'first'} index: {filled})")
            return
    for axis in reversed(range(wanted.ndim)):
        theirs, mine = (np.moveaxis(array, axis, 0).reshape(shape[axis], -1) for array in (wanted, actual))
        if theirs[0].size >= 2 and (words := _order(mine, theirs, far)):
            yield Recognized("order", f"along axis {axis}, {words}")
            return
    for one, two in itertools.combinations(range(wanted.ndim), 2):
        if block.explains(wanted.swapaxes(one, two).reshape(shape)):
            words = f"as after a reshape instead of a transpose of axes {one} and {two}"
            yield Recognized("transposed", f"the values are correct, but in different places, {words}")
            return
    squares = [float(np.square(array).sum()) for array in (actual, wanted)]
    tight = min(far, 0.01 / math.sqrt(wanted.size))  # tensors with the same distribution have similar sorted values
    if not math.isclose(*squares, rel_tol=max(far, 1e-6)) or len(np.unique(wanted)) < wanted.size / 2:
        return
    if is_close(np.sort(actual, axis=None), np.sort(wanted, axis=None), tight):
        words = "the values are correct, but in different places, as after a reshape without a transpose"
        yield Recognized("transposed", words)


def _order(actual: ndarray, wanted: ndarray, far: float) -> str:
    """Describe the permutation of rows that makes two matrices equal, or return an empty string."""
    size, some = len(wanted), chosen(wanted.shape[1], 16)
    mine, theirs = actual[:, some], wanted[:, some]
    parts = [n for n in range(2, size) if size % n == 0]
    orders = {f"the {n} parts are interleaved": np.arange(size).reshape(n, -1).T.ravel() for n in parts}
    for n in [n for n in (2, 3, 4) if size % n == 0 and n < size]:
        for order in itertools.permutations(range(n)):
            orders[f"the {n} parts are in the order {list(order)}"] = (
                np.arange(size).reshape(n, -1)[list(order)].ravel()
            )
    if matching := signatures.matching(mine, theirs, 0, far):
        orders[f"the order is {shortened(matching)}"] = np.array(matching)
    for words, indices in orders.items():
        if left(mine, theirs, theirs[indices], far) <= LEFT and left(actual, wanted, wanted[indices], far) <= LEFT:
            return words
    return ""
