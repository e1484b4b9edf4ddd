"""Tell whether an error comes from rounding or from a different formula.

The error of a different formula is a smooth function of the weights and inputs, so it stays almost the same after small
changes of them. Rounding errors are different every time, and therefore don't correlate.
"""

from __future__ import annotations

import math

import numpy as np

from transformer_parity.engine.tensors import Tensors
from transformer_parity.pairs.compare.conditions import varied_inputs
from transformer_parity.pairs.compare.difference import kept
from transformer_parity.pairs.compare.stages import Runs
from transformer_parity.pairs.compare.truth import Truth
from transformer_parity.pairs.contract.arrays import cast, rounded
from transformer_parity.pairs.contract.implementation import Arrays

CHANGE = 2.0**-6  # relative change of the weights, which is more than a rounding error of bfloat16
DRAWS = 3
OF_INPUTS = 2.0**-10  # relative change of the inputs; results may depend on an input with a high frequency
GROSS = 0.05  # an error that is larger than the rounding errors of any dtype
REPRODUCED = 0.5  # smallest correlation of the errors of a different formula


def correlations(truth: Truth, runs: Runs, stage: str, batch: int, dtype: str, names: list[str]) -> dict[str, float]:
    """Return how much the errors of a port correlate with its errors after small changes of all weights and inputs.

    Args:
        truth: The original.
        runs: The runs of both implementations.
        stage: The stage.
        batch: The number of the batch.
        dtype: The working dtype of the port.
        names: The names of the tensors.

    Returns:
        The mean correlation of each tensor; infinite if it could not be measured.
    """
    usual = _errors(truth, runs, stage, batch, dtype, None)
    rng = np.random.default_rng(1000)
    found: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(DRAWS):
        weights = truth.perturbed(dtype, CHANGE, 1000 + seed)
        inputs = cast(rounded(varied_inputs(runs.batches[batch], OF_INPUTS, rng), dtype), "float32")
        changed = _errors(truth, runs, stage, batch, dtype, (weights, inputs))
        for name in names:
            if name in usual and name in changed:
                found[name].append(_cosine(usual[name], changed[name]))
    return {name: float(np.mean(values)) if values else math.inf for name, values in found.items()}


def _errors(
    truth: Truth, runs: Runs, stage: str, batch: int, dtype: str, changed: tuple[Arrays, Arrays] | None
) -> Tensors:
    inputs = None
    if changed is None:
        expected, port = truth.tensors(stage, batch, dtype), truth.of_port(runs.port, dtype)
    else:
        weights, inputs = changed
        expected = runs.run(stage, truth.original.model(cast(weights, truth.dtype), truth.dtype), batch, inputs)
        port = runs.port.model(weights, dtype)
    actual = runs.run(stage, port, batch, inputs)
    return {
        name: np.where(kept(value) & kept(actual[name]), np.asarray(actual[name], np.float64) - value, 0.0)
        for name, value in expected.items()
        if name in actual and actual[name].shape == value.shape
    }


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    size = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(np.sum(first * second)) / size if size else 0.0
