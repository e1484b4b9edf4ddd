"""The tolerances of gradients, which follow from the reference's own float32 error."""

from __future__ import annotations

import numpy as np
import pytest

import reference_numpy as ref
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.stages.gradients import GradientStage
from transformer_parity.transformer.stages.training_stage import training_error

CASES = {case.name: case for case in standard_cases() if case.stage == "gradients" and "float32" in case.dtypes}


def largest_ratio(case, seed):
    """Return the largest error of correct float32 gradients, as a fraction of its tolerance, for perturbed weights."""
    expected = Reference().expected(case, Placement("float32"))
    model = ref.Transformer.from_weights(case.config, case.load_weights(), "float32", fast=bool(seed % 2))
    rng = np.random.default_rng(seed)
    exact = ref.Transformer.from_weights(case.config, case.load_weights(), "float64", fast=False)
    perturbed = {
        name: np.nextafter(array, rng.choice(np.array([-np.inf, np.inf], np.float32), array.shape))
        for name, array in model.export_weights().items()
    }
    ref.set_weights(model, perturbed)
    ref.set_weights(exact, perturbed)
    found, truth = (ref.gradients(each, **case.inputs).parameters for each in (model, exact))
    return max(
        training_error(name, found, truth) / expected.tolerances[f"of {name}"] for name in truth if truth[name].any()
    )


@pytest.mark.parametrize("name", CASES)
def test_correct_gradients_stay_well_below_their_tolerance(name):
    ratios = [largest_ratio(CASES[name], seed) for seed in range(2, 12)]
    assert max(ratios) < 0.7, ratios


@pytest.mark.parametrize("name", CASES)
def test_perturbed_baselines_widen_too_strict_tolerances(monkeypatch, name):
    tolerances = {}
    for runs in (GradientStage.perturbed_baselines, 0):
        monkeypatch.setattr(GradientStage, "perturbed_baselines", runs)
        tolerances[runs] = Reference().expected(CASES[name], Placement("float32")).tolerances
    several, one = tolerances.values()
    assert all(several[tensor] >= one[tensor] for tensor in one)
    # The factor depends on the rounding of the machine's kernels, because a single run can be accurate by chance.
    assert max(several[tensor] / one[tensor] for tensor in one if one[tensor]) > 1.5
