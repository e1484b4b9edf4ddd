"""Dependence tests: which rows and positions of the outputs change if some rows and positions of the inputs change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import Tensors
from transformer_parity.pairs.compare.conditions import is_mask
from transformer_parity.pairs.compare.stages import Runs
from transformer_parity.pairs.compare.truth import Truth
from transformer_parity.pairs.contract.arrays import cast, is_float
from transformer_parity.pairs.contract.implementation import Arrays
from transformer_parity.pairs.diagnose.locate import Located
from transformer_parity.pairs.diagnose.recognize import Recognized
from transformer_parity.pairs.run.side import SideModel

# Returns the indices of the results that change in the original and in the port if the inputs change.
Moved = Callable[[Arrays, Callable[[ndarray], ndarray]], tuple[set[int], set[int]]]
LEAST = 1e-9  # smallest relative change that is a dependence, in float64
LEAST_IN_FLOAT32 = 1e-4


def dependence(truth: Truth, runs: Runs, located: Located) -> Iterator[Recognized]:
    """Yield the dependences of the port that the original doesn't have, and the other way round.

    Args:
        truth: The original.
        runs: The runs of both implementations.
        located: The tensors at which the difference starts.
    """
    dtype, inputs = located.dtype, truth.batches[located.batch]
    models = truth.exact(dtype), truth.of_port(runs.port, dtype)
    usual = [_outputs(model, inputs) for model in models]
    least = LEAST if dtype == "float64" else LEAST_IN_FLOAT32

    def moved(changed: Arrays, where: Callable[[ndarray], ndarray]) -> tuple[set[int], set[int]]:
        """Return the indices that change in the original and in the port."""
        found = []
        for model, before in zip(models, usual, strict=True):
            after = _outputs(model, changed)
            wrong = {
                index
                for name, value in before.items()
                if value.ndim and value.shape == after[name].shape
                for index in where(np.abs(np.asarray(after[name] - value)) > least * np.abs(value).max(initial=1e-30))
            }
            found.append(wrong)
        return found[0], found[1]

    rows = {len(array) for array in inputs.values() if array.ndim}
    if len(rows) == 1 and (size := rows.pop()) > 1:
        changed = {name: _changed(array, np.arange(size) == 0) for name, array in inputs.items()}
        theirs, ours = moved(changed, lambda wrong: _indices(wrong, 0, size))
        if others := sorted(ours - theirs - {0}):
            yield Recognized(
                "batch dependence",
                f"if sequence 0 of the batch changes, the port's results of sequences {_listed(others)} change too, "
                "as with batch statistics in training mode",
            )
    if found := _positions(inputs, moved):
        yield found
    yield from _padding(inputs, moved)


def _positions(inputs: Arrays, moved: Moved) -> Recognized | None:
    """Report results at a position that depend on a position on which they must not depend, or the other way round."""
    lengths = {array.shape[1] for array in inputs.values() if array.ndim > 1}
    if not lengths:
        return None
    length = min(lengths)
    for position in dict.fromkeys((length - 1, length // 2, 0)):
        at = (np.arange(length) == position)[None]
        changed = {
            name: _changed(array, at) if array.ndim > 1 and array.shape[1] == length else array
            for name, array in inputs.items()
        }
        theirs, ours = moved(changed, lambda wrong: _indices(wrong, 1, length))
        if extra := sorted(ours - theirs):
            side = "later" if extra[0] < position else "earlier"
            said = f"the results at position {_listed(extra)} depend on the {side} position {position}"
            return Recognized("mask", f"in the port, {said}")
        if missing := sorted(theirs - ours):
            said = f"the results at position {_listed(missing)} don't depend on position {position}"
            return Recognized("mask", f"in the port, {said}")
    return None


def _padding(inputs: Arrays, moved: Moved) -> Iterator[Recognized]:
    """Report that values at masked positions affect the results at other positions."""
    for name, mask in inputs.items():
        if not is_mask(mask) or mask.ndim != 2 or mask.all():
            continue
        hidden = mask == 0
        changed = {
            other: _changed(array, hidden) if array.shape[:2] == mask.shape and other != name else array
            for other, array in inputs.items()
        }

        def visible(wrong: ndarray, hidden: ndarray = hidden) -> ndarray:
            if wrong.shape[:2] != hidden.shape:
                return np.flatnonzero(wrong.reshape(len(wrong), -1).any(1))
            return np.flatnonzero((wrong.reshape(*hidden.shape, -1).any(-1) & ~hidden).any(1))

        theirs, ours = moved(changed, visible)
        if extra := sorted(ours - theirs):
            yield Recognized(
                "mask", f"in the port, positions that {name} hides affect the results of sequences {_listed(extra)}"
            )


def _outputs(model: SideModel, inputs: Arrays) -> Tensors:
    return {name: value for name, value in model.forward(cast(inputs, model.dtype)).outputs.items() if is_float(value)}


def _indices(wrong: ndarray, axis: int, size: int) -> ndarray:
    if wrong.ndim <= axis or wrong.shape[axis] != size:
        return np.zeros(0, int)
    return np.flatnonzero(np.moveaxis(wrong, axis, 0).reshape(size, -1).any(1))


def _changed(array: ndarray, where: ndarray) -> ndarray:
    """Return a copy of an input with different valid values at some places. Masks are not changed.

    Args:
        array: The input.
        where: True at the first axes of the places to change.
    """
    if is_mask(array) or array.dtype.kind == "b" or array.ndim < where.ndim:
        return array
    low, high = array.min(), array.max()
    if is_float(array):
        other = array + 0.3 * (np.abs(array).max() or 1.0)
    else:
        other = (array - low + 1) % (high - low + 1) + low
    places = where.reshape(where.shape + (1,) * (array.ndim - where.ndim))
    return np.where(places, other, array).astype(array.dtype)


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:4])) + (", ..." if len(indices) > 4 else "")
