"""Experiments with weights: which weights a port uses, and which change of the weights makes it agree."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import Tensors
from transformer_parity.pairs.compare.difference import difference
from transformer_parity.pairs.compare.fresh import disturbed
from transformer_parity.pairs.compare.names import listed
from transformer_parity.pairs.contract.arrays import is_float
from transformer_parity.pairs.diagnose.recognize import Recognized
from transformer_parity.pairs.run.side import RunError

MOST_WEIGHTS = 200  # number of weights that are tried
REPAIRED = 0.05  # largest remaining fraction of the error
ORDINALS = {2: "halves", 3: "thirds", 4: "quarters"}


@dataclass(frozen=True)
class WrongTensor:
    """The tensor at which a difference starts.

    Attributes:
        name: The name of the tensor.
        weights: The weights of the original.
        port_weights: The same weights in the dtype of the port.
        original: A function that computes the tensor with the original from weights.
        port: The same for the port.
        far: Relative error above which the tensor is wrong.
    """

    name: str
    weights: Tensors
    port_weights: Tensors
    original: Callable[[Tensors], ndarray]
    port: Callable[[Tensors], ndarray]
    far: float


def weight_trials(subject: WrongTensor, deadline: float, repairs: bool) -> Iterator[Recognized]:
    """Yield the causes that experiments with weights show.

    First, each weight is changed in both implementations, to find weights that only one of them uses. Then the port is
    rerun with swapped, transposed, or reordered weights. If it then agrees, it uses these weights in this way.

    Args:
        subject: The tensor at which a difference starts.
        deadline: The time after which no further experiments are made.
        repairs: Whether to rerun the port with changed weights, which takes most of the time.
    """
    wanted, actual = subject.original(subject.weights), subject.port(subject.port_weights)
    error = difference(actual, wanted)
    if not is_float(wanted):  # a decision may stay the same although the weights change
        return
    names = [name for name, array in subject.weights.items() if is_float(array) and array.size][:MOST_WEIGHTS]
    used, used_by_port = set(), set()
    for name in names:
        if time.monotonic() > deadline:
            return
        if not np.array_equal(subject.original({**subject.weights, name: disturbed(subject.weights[name])}), wanted):
            used.add(name)
        if not np.array_equal(
            subject.port({**subject.port_weights, name: disturbed(subject.port_weights[name])}), actual
        ):
            used_by_port.add(name)
    unused = [name for name in names if name in used - used_by_port]
    extra = [name for name in names if name in used_by_port - used]
    if unused and extra:
        yield Recognized("swapped weights", f"the port uses {listed(extra)} instead of {listed(unused)}")
    elif unused:
        yield Recognized("unused weights", f"the port doesn't use {listed(unused)}")
    elif extra:
        yield Recognized(
            "swapped weights", f"changes of {listed(extra)} affect this value in the port, but not in the original"
        )
    if unused or extra or not repairs:
        return
    related = [name for name in names if name in used | used_by_port]
    for kind, sentence, changed in _repairs({name: subject.port_weights[name] for name in related}):
        if time.monotonic() > deadline:
            return
        with suppress(RunError):  # the model may check its weights
            found = subject.port({**subject.port_weights, **changed})
            if difference(found, wanted) <= min(subject.far, REPAIRED * error):
                yield Recognized(kind, sentence)
                return


def _repairs(weights: Tensors) -> Iterator[tuple[str, str, Tensors]]:
    """Yield changes of weights that repair a port: the kind of the bug, a description, and the changed weights."""
    for name, other in itertools.combinations(weights, 2):
        if weights[name].shape == weights[other].shape:
            yield (
                "swapped weights",
                f"{name} and {other} are swapped",
                {name: weights[other], other: weights[name]},
            )
    changes: dict[tuple[str, str], dict[str, ndarray]] = {}
    for name, array in weights.items():
        for kind, words, changed in _variants(array):
            changes.setdefault((kind, words), {})[name] = np.ascontiguousarray(changed)
    for (kind, words), changed_weights in changes.items():
        for name, changed in changed_weights.items():
            yield kind, f"{name} {words}", {name: changed}
    together: dict[tuple[str, str, int], Tensors] = {}  # for example, all weights of an LSTM, whose gates are in order
    for (kind, words), changed_weights in changes.items():
        if axis := re.search(r" along axis (\d)", words):
            for name, changed in changed_weights.items():
                key = (kind, words.replace(axis[0], ""), changed.shape[int(axis[1])])
                together.setdefault(key, {})[name] = changed
    for (kind, words, _), changed_weights in together.items():
        if len(changed_weights) > 2:
            yield kind, f"each of {listed([*changed_weights])} {words}", changed_weights
    for (kind, words), changed_weights in changes.items():
        for name, other in itertools.combinations(changed_weights, 2):
            if weights[name].ndim == weights[other].ndim:
                pair = {name: changed_weights[name], other: changed_weights[other]}
                yield kind, f"{name} and {other}: each {words}", pair


def _variants(array: ndarray) -> Iterator[tuple[str, str, ndarray]]:
    """Yield the ways in which a port may have misread a weight."""
    if array.ndim >= 2 and array.shape[0] == array.shape[1]:
        yield "transposed", "is transposed", array.swapaxes(0, 1)
    if array.ndim >= 3 and array.shape[-1] == array.shape[-2]:
        yield "transposed", "has its last two axes exchanged", array.swapaxes(-1, -2)
    if array.ndim >= 2:
        yield "transposed", "is reshaped instead of transposed", array.T.reshape(array.shape)
        yield "transposed", "is reshaped instead of transposed", array.reshape(array.shape[::-1]).T
    for order in itertools.permutations(range(array.ndim)) if 3 <= array.ndim <= 4 else ():
        if order != (*range(array.ndim),) and (order[0] == 0 or order[-1] == array.ndim - 1):
            words = f"is flattened in the order of the axes {list(order)}"
            yield "transposed", words, array.reshape([array.shape[i] for i in order]).transpose(np.argsort(order))
    yield "sign", "has the wrong sign", -array
    if array.ndim == 1:
        yield "offset", "has 1 added", array - 1
        yield "offset", "lacks an added 1", array + 1
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            yield "order", f"is reversed along axis {axis}", np.flip(array, axis)
    for axis in range(min(array.ndim, 2)):
        yield from _reordered(array, axis)


def _reordered(array: ndarray, axis: int) -> Iterator[tuple[str, str, ndarray]]:
    moved = np.moveaxis(array, axis, 0)
    size = len(moved)
    for parts, word in ORDINALS.items():
        if size % parts == 0 and size > parts:
            chunks = np.split(moved, parts)
            for order in itertools.permutations(range(parts)):
                if order != (*range(parts),):
                    text = f"has its {word} along axis {axis} in the order {', '.join(map(str, order))}"
                    yield "order", text, np.moveaxis(np.concatenate([chunks[i] for i in order]), 0, axis)
    for inner in (number for number in range(2, size) if size % number == 0):
        changed = moved.reshape(inner, size // inner, *moved.shape[1:]).swapaxes(0, 1).reshape(moved.shape)
        words = f"has axis {axis} flattened from [{size // inner}, {inner}] instead of [{inner}, {size // inner}]"
        yield "order", words, np.moveaxis(changed, 0, axis)
    for groups in range(1, min(size, 17)):
        if size % (2 * groups) == 0 and size > 2 * groups:
            split = moved.reshape(groups, 2, size // (2 * groups), *moved.shape[1:]).swapaxes(1, 2)
            joined = moved.reshape(groups, size // (2 * groups), 2, *moved.shape[1:]).swapaxes(1, 2)
            for text, changed in (("as halves", split), ("alternately", joined)):
                words = f"has the pairs of rows {text}, in heads of {size // groups}"
                yield "rotary pairs", words, np.moveaxis(changed.reshape(moved.shape), 0, axis)
    for parts in (3, 4):
        for inner in range(2, min(size, 17)):
            if size % (parts * inner) == 0 and size > parts * inner:
                shape = (inner, parts, size // (parts * inner), *moved.shape[1:])
                changed = moved.reshape(shape).swapaxes(0, 1).reshape(moved.shape)
                other = moved.reshape(parts, inner, *shape[2:]).swapaxes(0, 1).reshape(moved.shape)
                yield "order", f"is split by heads before it is split into {parts} parts", np.moveaxis(changed, 0, axis)
                yield "order", f"is split into {parts} parts before it is split by heads", np.moveaxis(other, 0, axis)
