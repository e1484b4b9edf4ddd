"""Recognize bugs in norms: a wrong epsilon, another kind of norm, or statistics of the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy import ndarray

from transformer_parity.engine.signatures import is_close
from transformer_parity.pairs.diagnose.formulas import LEFT, SAMPLED, Mismatch, Recognized, chosen, left

Layout = tuple[str, ndarray, ndarray]  # words, indices [rows, n] of some rows that are normalized, and their channels
Mode = tuple[bool, int, bool]  # whether a norm subtracts the mean, its degrees of freedom, whether epsilon is outside
MODES: tuple[Mode, ...] = tuple(
    (center, ddof, outside) for outside in (False, True) for center, ddof in ((True, 0), (False, 0), (True, 1))
)


def norms(block: Mismatch) -> Iterator[Recognized]:
    """Recognize a wrong epsilon or another kind of norm."""
    axes = list(dict.fromkeys([block.wanted.ndim - 1, min(1, block.wanted.ndim - 1)]))
    spatial = [axis for axis in axes if any(_is_line(x, block.wanted, axis, block.exact) for _, x in block.same)]
    layouts = list(_layouts(block.wanted.shape, axes, spatial))
    wanted, actual = block.wanted.ravel(), block.actual.ravel()
    for name, tensor in block.same:
        for axis in spatial:
            if found := list(_batch_norm(block, name, tensor, axis)):
                yield from found
                return
        x = tensor.ravel()
        for layout in layouts:
            _, table, channels = layout
            some = channels < 16  # enough channels to reject most layouts
            tries = MODES if _may_be_norm(x[table], wanted[table], some, channels) else ()
            for mode in tries:
                error, epsilon, scale, shift = _fit(x[table], wanted[table], channels, mode)
                if error <= block.exact:
                    others = [layout, *(other for other in layouts if other[0] != layout[0])]
                    yield from _other_norms(block.far, name, (x, actual, wanted), others, mode, epsilon, scale, shift)
                    return


def _layouts(shape: tuple[int, ...], axes: list[int], spatial: list[int]) -> Iterator[Layout]:
    """Yield the ways to normalize a tensor for every axis of channels, including over all axes except the batch."""
    length = len(shape) if len(shape) < 3 else max(2, 4 * SAMPLED * shape[0] // math.prod(shape))
    indices = np.arange(math.prod((min(length, shape[0]) if len(shape) > 2 else shape[0], *shape[1:])))
    indices = indices.reshape(-1, *shape[1:])
    for axis in axes:
        size, stride = shape[axis], math.prod(shape[axis + 1 :])
        groups = [n for n in range(1, 33) if size % n == 0 and n < size]
        moved = np.moveaxis(indices, axis, -1).reshape(-1, size)
        tables = {f"axis {axis}" + f" in {n} groups" * (n > 1): moved.reshape(-1, size // n) for n in groups}
        if axis in spatial and len(shape) > 2:
            moved = np.moveaxis(indices, axis, 1).reshape(len(indices), -1)
            names = {n: f"{n} group{'s' * (n > 1)} of channels" for n in groups} | {size: "each channel"}
            tables |= {f"{words} (axis {axis})": moved.reshape(len(indices) * n, -1) for n, words in names.items()}
        for words, table in tables.items():
            rows = table[chosen(len(table), max(64, SAMPLED // table.shape[1]))]
            channels = rows // stride % size
            if np.bincount(channels.ravel()).min() >= 4:
                yield words, rows, channels


def _may_be_norm(x: ndarray, y: ndarray, some: ndarray, channels: ndarray) -> bool:
    """Return whether some channels of y are approximately linear functions of the normalized rows of x."""
    for mode in MODES[:2]:
        normal = _normal(x, mode, 0.0)[0][some]
        scale, shift = _affine(normal, y[some], channels[some])
        if np.abs(y[some] - scale[channels[some]] * normal - shift[channels[some]]).max() < 0.3 * np.abs(y[some]).max():
            return True
    return False


def _is_line(x: ndarray, y: ndarray, axis: int, exact: float) -> bool:
    """Return whether y is a linear function of x in one channel of the first row of the batch."""
    if x.ndim > 2:
        x, y = (np.moveaxis(array, axis, 1)[0] for array in (x, y))
    else:
        x, y = x.T, y.T
    x, y = x[0].ravel()[:64], y[0].ravel()[:64]
    slope = np.cov(x, y, bias=True)[0, 1] / max(x.var(), 1e-300)
    return len(x) > 2 and is_close(y.mean() + slope * (x - x.mean()), y, exact)


def _normal(x: ndarray, mode: Mode, epsilon: float) -> tuple[ndarray, ndarray]:
    """Return normalized rows, and their derivatives with respect to epsilon."""
    center, ddof, outside = mode
    centered = x - x.mean(1, keepdims=True) if center else x
    variance = np.square(centered).sum(1, keepdims=True) / max(x.shape[1] - ddof, 1)
    if outside:
        deviation = np.sqrt(variance) + epsilon
        return centered / deviation, -centered / deviation**2
    return centered / np.sqrt(variance + epsilon), -0.5 * centered * (variance + epsilon) ** -1.5


def _affine(x: ndarray, y: ndarray, channels: ndarray) -> tuple[ndarray, ndarray]:
    """Return the scale and shift of each channel for which ``scale * x + shift`` is closest to ``y``."""
    ids = channels.ravel()
    number = np.maximum(np.bincount(ids), 1)
    of_x, of_y = (np.bincount(ids, array.ravel()) / number for array in (x, y))
    x = x - of_x[channels]
    scale = np.bincount(ids, (x * y).ravel()) / np.maximum(np.bincount(ids, np.square(x).ravel()), 1e-300)
    return scale, of_y - scale * of_x


def _fit(
    x: ndarray, y: ndarray, channels: ndarray, mode: Mode, affine: tuple[ndarray, ndarray] | None = None
) -> tuple[float, float, ndarray, ndarray]:
    """Fit epsilon, and the scale and shift of each channel unless they are given, by Gauss-Newton steps.

    Returns:
        The largest relative error, epsilon, the scale, and the shift.
    """
    size = np.square(x).mean(1)
    typical = math.sqrt(size.mean()) if mode[2] else float(size.mean())
    epsilon, error, largest = 1e-6 * typical, math.inf, max(float(np.abs(y).max()), 1e-300)
    best = (error, epsilon, *(affine or _affine(x, y, channels)))
    if np.ptp(size) <= 1e-6 * size.mean():  # epsilon would only rescale the result
        return best
    for _ in range(15):
        normal, slope = _normal(x, mode, epsilon)
        scale, shift = affine or _affine(normal, y, channels)
        rest = y - scale[channels] * normal - shift[channels]
        error = float(np.abs(rest).max() / largest)
        if error < best[0]:
            best = (error, epsilon, scale, shift)
        slope = scale[channels] * slope
        if not affine:
            factor, constant = _affine(normal, slope, channels)
            slope = slope - factor[channels] * normal - constant[channels]
        step = float(np.vdot(slope, rest) / max(float(np.vdot(slope, slope)), 1e-300))
        moved = min(max(epsilon + step, 0.0), 10.0 * epsilon + 0.1 * typical)
        if error > 0.3 or abs(moved - epsilon) <= 1e-12 * epsilon:
            break
        epsilon = moved
    return best


def _other_norms(
    far: float,
    name: str,
    tensors: tuple[ndarray, ndarray, ndarray],
    layouts: list[Layout],
    mode: Mode,
    epsilon: float,
    scale: ndarray,
    shift: ndarray,
) -> Iterator[Recognized]:
    """Find the norm of the port, given the formula of the correct norm."""
    tried: list[tuple[float, Recognized]] = []
    x, actual, wanted = tensors
    words, table, channels = layouts[0]
    for other in MODES:
        _, mine, *_ = _fit(x[table], actual[table], channels, other, (scale, shift))
        predicted = scale[channels] * _normal(x[table], other, mine)[0] + shift[channels]
        differences = [
            text
            for text, differs in (
                (f"the mean {'is' if other[0] else 'is not'} subtracted", other[0] != mode[0]),
                (f"the variance is divided by {'n - 1' if other[1] else 'n'}", other[1] != mode[1] and other[0]),
                (
                    f"epsilon is added {'after' if other[2] else 'before'} the square root is computed",
                    other[2] != mode[2],
                ),
            )
            if differs
        ] or [f"epsilon is {_shown(mine, epsilon, far)} instead of {_shown(epsilon, epsilon, 0.0)}"]
        kind = "epsilon" if other[:2] == mode[:2] else "norm"
        text = f"in the norm of {name} over {words}, {' and '.join(differences)}"
        tried.append((left(actual[table], wanted[table], predicted, far), Recognized(kind, text)))
    normal = _normal(x[table], mode, epsilon)[0]
    for text, other_scale in (
        ("1 + weight instead of weight", 1.0 + scale),
        ("weight instead of 1 + weight", scale - 1.0),
        ("not applied", 1.0 + 0.0 * scale),
    ):
        predicted = other_scale[channels] * normal + shift[channels]
        found = Recognized("norm", f"in the norm of {name} over {words}, the scale is {text}")
        tried.append((left(actual[table], wanted[table], predicted, far), found))
    for other_words, table, channels in layouts[1:]:
        if len(scale) > channels.max():
            predicted = scale[channels] * _normal(x[table], mode, epsilon)[0] + shift[channels]
            found = Recognized("norm", f"the norm of {name} is over {other_words} instead of {words}")
            tried.append((left(actual[table], wanted[table], predicted, far), found))
    least = min(error for error, _ in tried)
    yield from (found for error, found in tried if error <= min(LEFT, 3.0 * least + 1e-12))


def _shown(epsilon: float, other: float, far: float) -> str:
    return "0" if epsilon < 20.0 * far * other else f"{float(f'{epsilon:.2g}'):g}"


def _batch_norm(block: Mismatch, name: str, x: ndarray, axis: int) -> Iterator[Recognized]:
    """Recognize bugs if each channel of the correct tensor is a linear function of the same channel of x."""
    size, others = x.shape[axis], tuple(other for other in range(x.ndim) if other != axis)
    if size < 4 or x.size < 4 * size or not _is_line(x, block.wanted, axis, block.exact):
        return
    mean, variance = x.mean(others, keepdims=True), x.var(others, keepdims=True)
    lines = []
    for y, far in ((block.wanted, block.exact), (block.actual, block.far)):
        scale = ((x - mean) * y).mean(others, keepdims=True) / np.maximum(variance, 1e-300)
        shift = y.mean(others, keepdims=True) - scale * mean
        if not is_close(scale * x + shift, y, far):
            return
        lines.append((scale.ravel(), shift.ravel()))
    vectors = block.vectors(size)
    means = [scale * mean.ravel() + shift for scale, shift in lines]
    for beta in (*vectors.values(), np.zeros(size)):
        noise = 10.0 * block.far * np.abs(block.wanted).max()
        if np.abs(means[1] - beta).max() <= noise < np.abs(means[0] - beta).max():
            words = f"each channel of {name} (axis {axis}) is normalized with the mean and variance of the batch"
            yield Recognized("training mode", f"{words}, as in training")
            return
    for gamma, running in itertools.product((*vectors.values(), np.ones(size)), vectors.values()):
        right, mine = (np.square(gamma / scale) - running for scale, _ in lines)
        largest = np.abs(running).max()
        if (
            np.ptp(right) <= 1e-7 * largest
            and np.ptp(mine) <= max(1e-6, 0.1 * block.far) * largest
            and right.min() >= 0.0
        ):
            numbers = f"{_shown(mine.mean(), right.mean(), block.far)} instead of {_shown(right.mean(), 0.0, 0.0)}"
            yield Recognized("epsilon", f"in the batch norm of {name}, epsilon is {numbers}")
            return
