"""Rerun both implementations with new weights, to find a port that doesn't compute its results from its weights.

Such a port may load its own weights, or return results that the original computed earlier. The port runs first, so that
results of the original with these weights don't exist yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy import ndarray

from transformer_parity.engine.localization import same_bits
from transformer_parity.engine.tensors import Tensors
from transformer_parity.pairs.compare.difference import difference
from transformer_parity.pairs.compare.rounding import CHANGE
from transformer_parity.pairs.compare.stages import FORWARD, OUTPUT, Runs, plain_name
from transformer_parity.pairs.compare.truth import Tolerances, Truth
from transformer_parity.pairs.contract.arrays import cast, is_float
from transformer_parity.pairs.run.side import RunError, SideModel

SEED = 2000
FOLLOWED = 0.5  # largest error of a port that follows the weights, as a fraction of the change of the original


def ignored(truth: Truth, runs: Runs, stage: str, dtype: str, tolerances: Tolerances) -> tuple[str, bool]:
    """Return why a port's results don't follow a change of all weights, and whether the original's results change.

    The reason is empty if the port's results follow the change, or if the original's results don't change.
    """
    weights = truth.perturbed(dtype, CHANGE, SEED)

    def results(model: SideModel) -> Tensors:
        found = runs.run(stage, model, 0)
        found = {name: value for name, value in found.items() if stage != FORWARD or name.startswith(OUTPUT)}
        return {name: value for name, value in found.items() if is_float(value)} or found

    usual = results(truth.exact(dtype))
    try:
        actual = results(runs.port.model(weights, dtype))
    except RunError as error:
        return f"{stage} fails if all weights change by up to 1.6%: {error}", True
    with suppress(RunError):
        expected = results(truth.original.model(cast(weights, truth.dtype), truth.dtype))
        moved = {name: _apart(value, usual[name]) for name, value in expected.items() if name not in tolerances.zeros}
        for name, change in moved.items():
            allowed = FOLLOWED * change + tolerances.limit(name)
            if 0.0 < change < np.inf and not (name in actual and _apart(actual[name], expected[name]) <= allowed):
                return f"{plain_name(name)} doesn't follow a change of all weights by up to 1.6% in {stage}", True
        return "", any(moved.values())
    return "", True


def without_effect(truth: Truth, stages: Sequence[str], deadline: float) -> tuple[list[str], int]:
    """Return the weights that don't affect any result of the original, and the number of weights that weren't tried.

    Args:
        truth: The original.
        stages: The stages that are compared.
        deadline: The time after which no further weights are tried.
    """
    weights = truth.model().weights
    names = [name for name, array in weights.items() if is_float(array) and array.size]
    found: list[str] = []
    for i, name in enumerate(names):
        if time.monotonic() > deadline:
            return found, len(names) - i
        changed = {**weights, name: disturbed(weights[name])}
        model = truth.original.model(changed, truth.dtype)
        with suppress(RunError):  # the original may check its weights
            if not any(_moves(truth, model, stage, batch) for stage in stages for batch in range(len(truth.batches))):
                found.append(name)
    return found, 0


def disturbed(array: ndarray) -> ndarray:
    """Return a weight with changed values.

    The changes have both signs, because the choice of an expert ignores a constant that is added to all scores.
    """
    noise = np.random.default_rng(0).uniform(-1.0, 1.0, array.shape)
    return (array + 0.3 * (np.abs(array).max() or 1.0) * noise).astype(array.dtype)


def _moves(truth: Truth, model: SideModel, stage: str, batch: int) -> bool:
    """Return whether a result of a stage changes if the original is replaced with a model with different weights."""
    after = truth.run(stage, model, batch)
    before = truth.tensors(stage, batch)
    return any(
        name not in after or not same_bits(after[name], value)
        for name, value in before.items()
        if stage != FORWARD or name.startswith(OUTPUT)
    )


def _apart(actual: ndarray, expected: ndarray) -> float:
    """Return the relative error, or the fraction of decisions that differ."""
    if is_float(expected) or actual.shape != expected.shape:
        return difference(actual, expected)
    return float(np.mean(actual != expected))
