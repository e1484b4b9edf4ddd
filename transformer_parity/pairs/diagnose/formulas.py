"""Recognize bugs in formulas of a block: rotary embeddings, activations, and selections of values.

A formula is recognized if it reproduces the correct tensor from earlier tensors, and if a variant of the formula
reproduces the port's tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy import ndarray

from transformer_parity.engine.signatures import is_close
from transformer_parity.engine.signatures import wrong as is_wrong

Named = list[tuple[str, ndarray]]
MOST_WEIGHTS = 64  # maximum number of weights that are tested as matrices or vectors
SAMPLED = 1 << 13  # approximate number of values that are used to test a formula
LEFT = 0.05  # a hypothesis must explain all of the error except this fraction
EXACT = 1e-8  # relative tolerance for formulas that must reproduce the correct float64 tensor
_erf = np.vectorize(math.erf, otypes=[np.float64])  # NumPy has no error function


@dataclass(frozen=True)
class Recognized:
    """A recognized bug.

    Attributes:
        kind: One of ``KINDS``.
        sentence: A description of the bug, without a final period.
    """

    kind: str
    sentence: str


@dataclass(frozen=True)
class Mismatch:
    """The two tensors, and the tensors from which they may have been computed.

    Attributes:
        same: Earlier tensors that have the shape of the tensors, the nearest one first.
        near: The nearest earlier tensors of any shape, the nearest one first.
        exact: Relative tolerance for formulas that must reproduce the correct tensor.
    """

    actual: ndarray
    wanted: ndarray
    same: Named
    near: Named
    weights: dict[str, ndarray]
    far: float
    exact: float = EXACT

    def explains(self, predicted: ndarray) -> bool:
        """Return whether a prediction of the port's tensor explains the error."""
        return left(self.actual, self.wanted, predicted, self.far) <= LEFT

    def vectors(self, size: int) -> dict[str, ndarray]:
        """Return weights that are vectors of a given size."""
        found = ((name, value.ravel().astype(np.float64)) for name, value in self.weights.items() if value.size == size)
        return dict(itertools.islice(found, MOST_WEIGHTS))


def left(actual: ndarray, wanted: ndarray, predicted: ndarray, far: float) -> float:
    """Return the fraction of the error that a prediction doesn't explain, or infinity if an element is wrong."""
    if predicted.shape != actual.shape:
        return math.inf
    some = np.unravel_index(chosen(actual.size, 64), actual.shape)
    if not np.abs(predicted[some] - actual[some]).max() <= far * np.abs(actual).max():  # most hypotheses fail here
        return math.inf
    if not is_close(predicted, actual, far):
        return math.inf
    return float(np.linalg.norm(actual - predicted)) / max(float(np.linalg.norm(actual - wanted)), 1e-300)


def chosen(size: int, most: int) -> ndarray:
    """Return at most ``most`` sorted indices below ``size``, chosen at random but always the same ones."""
    return np.arange(size) if size <= most else np.sort(np.random.default_rng(0).choice(size, most, replace=False))


def is_float(array: ndarray) -> bool:
    """Return whether an array contains finite floating-point numbers."""
    return array.dtype.kind == "f" and bool(np.isfinite(array).all())


def in_shape(array: ndarray, shape: tuple[int, ...]) -> Iterator[ndarray]:
    """Yield an array if it has the given shape, or if it does after its heads are separated."""
    if array.shape == shape:
        yield array
    elif array.ndim == 3 and len(shape) == 4 and array.size == math.prod(shape):
        batch, one, two, width = shape
        if array.shape[:2] == (batch, one):
            yield array.reshape(shape)
        if array.shape[:2] == (batch, two):
            yield array.reshape(batch, two, one, width).swapaxes(1, 2)


def rotary(block: Mismatch) -> Iterator[Recognized]:
    """Recognize wrong pairs or wrong angles in a rotation of pairs of values."""
    size = block.wanted.shape[-1]
    widths = [size, *(width for width in range(size // 2, 3, -1) if size % width == 0 and width % 2 == 0)]
    for (name, x), width in itertools.product(block.same, widths):
        if width == size:  # values that never change are not rotated
            changed = np.flatnonzero(np.abs(block.wanted - x).reshape(-1, size).max(0) > 1e-9 * np.abs(x).max())
            width = int(changed[-1]) + 1 + (int(changed[-1]) + 1) % 2 if changed.size else size
            x, wanted, actual = (array[..., :width] for array in (x, block.wanted, block.actual))
        else:
            shape = (*x.shape[:-1], size // width, width)
            x, wanted, actual = (array.reshape(shape) for array in (x, block.wanted, block.actual))
        for half in (True, False) if x.shape[-1] % 2 == 0 and x.ndim > 1 else ():
            right = _rotation(x, wanted, half, block.exact)
            if right is None or np.abs(right[1] - 1.0).max() < block.exact:
                continue
            kinds = {True: f"(i, i + {width // 2})", False: "(2i, 2i + 1)"}
            if mine := _rotation(x, actual, half, block.far):
                yield Recognized(
                    "rotary angle", f"in the rotation of {name}, {_angles(right, mine, max(block.far, block.exact))}"
                )
                return
            if _rotation(x, actual, not half, block.far):
                words = f"pairs {kinds[not half]} of {name} are rotated instead of pairs {kinds[half]}"
                yield Recognized("rotary pairs", words)
                return


def _rotation(x: ndarray, y: ndarray, half: bool, far: float) -> tuple[int, ndarray] | None:
    """Return the axis of the positions, and the rotations [positions, pairs] of x to y as complex numbers."""
    middle = x.shape[-1] // 2
    one, two = (slice(middle), slice(middle, None)) if half else (slice(0, None, 2), slice(1, None, 2))
    rows = np.unravel_index(chosen(x[..., 0].size, 64), x.shape[:-1])
    sizes = [np.hypot(array[rows][..., one], array[rows][..., two]) for array in (x, y)]
    if not is_close(sizes[1], sizes[0], far):
        return None
    before, after = (array[..., one] + 1j * array[..., two] for array in (x, y))
    product = after * before.conj()
    for axis in reversed(range(x.ndim - 1)):
        others = tuple(other for other in range(x.ndim - 1) if other != axis)
        total = product.sum(others, keepdims=True)
        turn = total / np.maximum(np.abs(total), 1e-300)
        if total.size < product.size and is_close(before * turn, after, far):
            return axis, turn.reshape(-1, turn.shape[-1])
    return None


def _angles(right: tuple[int, ndarray], mine: tuple[int, ndarray], far: float) -> str:
    """Describe the difference between two rotations [positions, pairs]."""
    if right[0] != mine[0]:
        return f"the angles depend on axis {mine[0]} instead of axis {right[0]}"
    wanted, actual = right[1], mine[1]
    far = 10.0 * max(far, EXACT)
    if np.abs(actual - 1.0).max() < far:
        return "nothing is rotated"
    if np.abs(actual - wanted.conj()).max() < far:
        return "the angles have the wrong sign"
    steps = [array[1:] * array[:-1].conj() for array in (wanted, actual)]
    thetas = [np.angle(step.mean(0)) for step in steps if len(step) and np.abs(step - step.mean(0)).max() < far]
    if len(thetas) < 2:
        return "the angles are wrong"
    one, two = thetas
    if np.abs(two - one).max() < far:
        shift = next((n for n in range(-64, 65) if np.abs(actual - wanted * np.exp(1j * n * one)).max() < far), 0)
        return f"the positions are shifted by {shift}" if shift else "the angles are wrong"
    scale = float(np.vdot(one, two) / np.vdot(one, one))
    if np.abs(two - scale * one).max() < far:
        return f"the angles are {scale:.4g} times the correct ones"
    bases = _base(two), _base(one)
    return f"the base is {bases[0]:g} instead of {bases[1]:g}" if all(bases) else "the angles are wrong"


def _base(theta: ndarray) -> float:
    """Return the base of a geometric sequence of angles, rounded to three digits, or 0 if it isn't geometric."""
    used = np.flatnonzero(theta > 1e-3)
    if len(theta) < 2 or len(used) < 2:
        return 0.0
    slope, start = np.polyfit(used / len(theta), np.log(theta[used]), 1)
    fitted = np.exp(start + slope * np.arange(len(theta)) / len(theta))
    return float(f"{math.exp(-slope):.3g}") if np.abs(fitted - theta).max() < 1e-3 else 0.0


def _sigmoid(x: ndarray) -> ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _softplus(x: ndarray) -> ndarray:
    return np.logaddexp(x, 0.0)


def _softmax(x: ndarray) -> ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _leaky(slope: float) -> Callable[[ndarray], ndarray]:
    return lambda x: np.where(x > 0.0, x, slope * x)


ACTIVATIONS: dict[str, Callable[[ndarray], ndarray]] = {
    "no activation": lambda x: x,
    "ReLU": _leaky(0.0),
    **{f"leaky ReLU with slope {slope}": _leaky(slope) for slope in (0.01, 0.1, 0.2, 0.3)},
    "exact GELU": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "GELU with tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "quick GELU": lambda x: x * _sigmoid(1.702 * x),
    "SiLU": lambda x: x * _sigmoid(x),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "hard swish": lambda x: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0),
    "hard sigmoid": lambda x: np.clip(x / 6.0 + 0.5, 0.0, 1.0),
    "hard sigmoid with slope 0.2": lambda x: np.clip(0.2 * x + 0.5, 0.0, 1.0),
    "ELU": lambda x: np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0))),
    "ReLU6": lambda x: np.clip(x, 0.0, 6.0),
    "squared ReLU": lambda x: np.square(np.maximum(x, 0.0)),
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "softmax": _softmax,
    "log softmax": lambda x: np.log(_softmax(x)),
}


def activations(block: Mismatch) -> Iterator[Recognized]:
    """Recognize another activation, in an activation, a gated product, or the input or output of a linear layer."""
    width = block.wanted.shape[-1]
    rows = chosen(block.wanted.size // width, max(8, SAMPLED // width))
    wanted, actual = (array.reshape(-1, width)[rows] for array in (block.wanted, block.actual))

    def compared(words: str, predict: Callable[[ndarray], ndarray], x: ndarray) -> Iterator[Recognized]:
        results = {name: predict(function(x)) for name, function in ACTIVATIONS.items()}
        theirs = [name for name, result in results.items() if is_close(result, wanted, block.exact)]
        if not theirs:
            return
        mine = [name for name, result in results.items() if left(actual, wanted, result, block.far) <= LEFT]
        if mine:
            yield Recognized("activation", f"{words} is {' or '.join(mine)} instead of {' or '.join(theirs)}")

    def sampled(array: ndarray) -> ndarray:
        return array.reshape(-1, array.shape[-1])[rows]

    pool = [(name, sampled(x)) for name, x in block.same]
    for name, x in block.near:
        if x.shape == (*block.wanted.shape[:-1], 2 * width):
            halves = (("the first half", np.s_[:width]), ("the second half", np.s_[width:]))
            steps = (("the even values", np.s_[::2]), ("the odd values", np.s_[1::2]))
            pool += [(f"{words} of {name}", sampled(x)[:, part]) for words, part in (*halves, *steps)]
    for name, x in pool:
        yield from compared(f"the activation of {name}", lambda y: y, x)
    for (name, x), (other, y) in itertools.combinations(pool, 2):  # as after a residual connection
        yield from compared(f"the activation of {name} plus {other}", lambda z: z, x + y)
    gates = {words: function for words, function in ACTIVATIONS.items() if words != "no activation"}
    few = [x[:4, :64] for _, x in pool]
    applied = [np.stack([function(x) for words, function in gates.items() if "softmax" not in words]) for x in few]
    for one, two in itertools.permutations(range(len(pool)), 2):
        errors = np.abs(applied[one] * few[two] - wanted[:4, :64]).max((1, 2))
        if errors.min() <= block.exact * np.abs(wanted[:4, :64]).max():
            (name, x), (by, factor) = pool[one], pool[two]
            yield from compared(f"the activation of {name}", partial(np.multiply, factor), x)
            for words, function in gates.items():
                is_right = is_close(function(x) * factor, wanted, block.exact)
                if is_right and left(actual, wanted, function(factor) * x, block.far) <= LEFT:
                    yield Recognized("swapped", f"{words} is applied to {by} instead of {name}")
    inputs = [(name, sampled(x)) for name, x in block.near if x.shape[:-1] == block.wanted.shape[:-1] and x.ndim > 1]
    for name, x in inputs if len(rows) > 3 else ():
        yield from _linear(block, name, x, np.ones(1), wanted, compared)
    for (name, x), (other, y) in itertools.permutations(inputs, 2) if len(rows) > 3 else ():
        if x.shape == y.shape:  # as in a gated network
            yield from _linear(block, f"{name} (times {other})", x, y, wanted, compared)


def _product(matrix: ndarray, bias: ndarray, factor: ndarray, x: ndarray) -> ndarray:
    return (factor * x) @ matrix + bias


def _linear(
    block: Mismatch,
    name: str,
    x: ndarray,
    factor: ndarray,
    wanted: ndarray,
    compared: Callable[..., Iterator[Recognized]],
) -> Iterator[Recognized]:
    """Recognize another activation of x before a product with a factor and a weight, or after a product with a weight.

    Args:
        block: The two tensors.
        name: The name of x.
        x: Some rows of an earlier tensor.
        factor: Rows of the tensor that multiplies the activation, or 1.
        wanted: Rows of the correct tensor.
        compared: A function that compares activations.
    """
    size, width, some = x.shape[-1], wanted.shape[-1], np.s_[:6, :4]
    inputs = np.stack([function(x[:6]) * factor[:6] for function in ACTIVATIONS.values()])
    products: list[tuple[str, ndarray, ndarray]] = []  # before an activation
    noise = block.exact * np.abs(wanted[some]).max()
    parts = [  # a stacked weight contains the kernels of several layers
        (f"{key}[{i}]" if value.ndim > 2 else key, part)
        for key, value in block.weights.items()
        if value.shape[-2:] in ((size, width), (width, size))
        for i, part in enumerate(value.reshape(-1, *value.shape[-2:]))
    ]
    for key, value in parts[:MOST_WEIGHTS]:
        prefix = key.rpartition("." if "." in key else "/")[0]
        biases = [bias for other, bias in block.vectors(width).items() if prefix and other.startswith(prefix)]
        for matrix in [each for each in (value, value.T) if each.shape == (size, width)]:
            outputs = inputs @ matrix[:, :4]
            spread = np.ptp(wanted[some] - outputs, axis=1).max(1)
            if spread.min() <= noise:
                bias = wanted[0] - (factor[:1] * [*ACTIVATIONS.values()][int(spread.argmin())](x[:1]))[0] @ matrix
                words = f"the activation of {name} before the product with {key}"
                yield from compared(words, partial(_product, matrix, bias, factor), x)
            products += [(key, matrix, bias) for bias in (np.zeros(width), *biases)]
    if not products or factor.size > 1:
        return
    outputs = np.stack([x[:6] @ matrix[:, :4] + bias[:4] for _, matrix, bias in products])
    for words, function in ACTIVATIONS.items():
        errors = np.abs(function(outputs) - wanted[some]).max((1, 2))
        if "softmax" not in words and errors.min() <= noise:
            key, matrix, bias = products[int(errors.argmin())]
            yield from compared(f"the activation of the product of {name} and {key}", lambda y: y, x @ matrix + bias)


def selected(block: Mismatch) -> Iterator[Recognized]:
    """Recognize that the tensor consists of the wrong values of a larger earlier tensor, such as queries of a QKV."""
    for name, x in block.near:
        pairs = [(block.actual, block.wanted)]
        pairs += [(block.actual.swapaxes(1, 2), block.wanted.swapaxes(1, 2))] if block.wanted.ndim == 4 else []
        for actual, wanted in pairs:
            if x.ndim < 2 or x.shape[:-1] != wanted.shape[: x.ndim - 1] or wanted.size >= x.size:
                continue
            flat = x.reshape(-1, x.shape[-1])
            rows = chosen(len(flat), 16)
            orders = []
            for array, far in ((wanted, block.exact), (actual, block.far)):
                columns, order = array.reshape(len(flat), -1), []
                for column in columns[rows].T:
                    errors = np.abs(flat[rows] - column[:, None]).max(0)
                    order.append(int(errors.argmin()))
                    if errors[order[-1]] > far * np.abs(flat).max():
                        break
                if len(rows) < 4 or len(order) < columns.shape[1] or not is_close(columns, flat[:, order], far):
                    break
                orders.append(_runs(order))
            if len(orders) == 2 and orders[0] != orders[1]:
                yield Recognized("order", f"{name}: values [{orders[1]}] instead of [{orders[0]}]")
                return


def looked_up(block: Mismatch) -> Iterator[Recognized]:
    """Recognize wrong rows of a table, such as position embeddings."""
    width = block.wanted.shape[-1]
    wanted, actual = (array.reshape(-1, width) for array in (block.wanted, block.actual))
    wrong = np.flatnonzero(is_wrong(actual, wanted, block.far).any(1))
    some = wrong[chosen(len(wrong), 64)]
    for name, table in block.weights.items():
        if table.ndim != 2 or table.shape[1] != width or len(table) < 3 or width < 2 or not len(some):
            continue
        if not is_close(
            table[_nearest(table, wanted[some[:1]])], wanted[some[:1]], block.exact
        ):  # most tables fail here
            continue
        right, mine = _nearest(table, wanted[some]), _nearest(table, actual[some])
        if not is_close(wanted[some], table[right], block.exact) or not is_close(actual[some], table[mine], block.far):
            continue
        if (right != mine).all():
            index = [int(i) for i in np.unravel_index(some[0], block.wanted.shape[:-1])]
            words = f"the port reads row {mine[0]} of {name} instead of row {right[0]} at {index}"
            yield Recognized("shifted", words)


def _nearest(table: ndarray, vectors: ndarray) -> ndarray:
    """Return the index of the row of a table that is nearest to each vector."""
    return np.array([np.abs(table - vector).max(1).argmin() for vector in vectors])


def _runs(indices: list[int]) -> str:
    """Return indices as slices."""
    breaks = [i for i in range(1, len(indices)) if indices[i] != indices[i - 1] + 1]
    runs = [indices[i:j] for i, j in itertools.pairwise([0, *breaks, len(indices)])]
    return ", ".join(f"{run[0]}:{run[-1] + 1}" for run in runs[:8]) + (", ..." if len(runs) > 8 else "")
