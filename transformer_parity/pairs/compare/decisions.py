"""Discrete decisions, such as the experts that a router chooses: find out whether a different one is a near-tie.

A port may decide differently if the decision depends on rounding errors. To find such near-ties, the weights of the
original are changed by a few rounding errors. The port may decide in any way in which the original then decides.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import Tensors
from transformer_parity.pairs.compare.stages import OUTPUT, Runs
from transformer_parity.pairs.compare.truth import ALL_EPS, Truth
from transformer_parity.pairs.contract.arrays import cast, is_float, rounded, varied

DRAWS = 8  # number of changed weights
SIZE = 16.0  # relative change of a weight, in rounding errors
MOST = 0.25  # largest fraction of a tensor's decisions that may differ; more are not due to rounding
FEW = 2  # number of decisions that may always differ, because two near-tied ranks are exchanged


def near_ties(
    truth: Truth, runs: Runs, stage: str, batch: int, dtype: str, actual: Tensors, expected: Tensors
) -> dict[str, int]:
    """Return the number of different decisions in each tensor in which all of them are near-ties.

    Args:
        truth: The original.
        runs: The runs of both implementations.
        stage: The stage.
        batch: The number of the batch.
        dtype: The working dtype of the port.
        actual: The tensors of the port.
        expected: The tensors of the original.
    """
    wrong = {
        name: actual[name] != value
        for name, value in expected.items()
        if name in actual and not is_float(value) and value.shape == actual[name].shape
    }
    wrong = {name: places for name, places in wrong.items() if 0 < places.sum() <= max(FEW, MOST * places.size)}
    if not wrong:
        return {}
    confirmed: dict[str, ndarray] = {name: np.zeros_like(places) for name, places in wrong.items()}
    rng = np.random.default_rng(0)
    base = cast(rounded(truth.weights, dtype), "float64")
    for _ in range(DRAWS):
        weights = varied(base, SIZE * ALL_EPS[dtype], rng)
        found = runs.run(stage, truth.original.model(cast(weights, truth.dtype), truth.dtype), batch)
        for name in wrong:
            confirmed[name] |= found[name] == actual[name]
    return {name: int(places.sum()) for name, places in wrong.items() if not (places & ~confirmed[name]).any()}


def follow(truth: Truth, runs: Runs, batch: int, dtype: str, actual: Tensors, decided: dict[str, int]) -> Tensors:
    """Return the original's tensors in a forward pass that follows the port's decisions at near-ties."""
    given = {name: actual[name] for name in decided if not name.startswith(OUTPUT)}
    return runs.forward(truth.exact(dtype), batch, given)
