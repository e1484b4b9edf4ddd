"""Local steps (docs/examples/local_steps.py) match ordinary training in the cases in which the two are equivalent."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import assert_near

import reference_numpy as ref
from reference_numpy import Plan
from transformer_parity.transformer.distributed.cases import probes
from transformer_parity.transformer.ports.registry import PORTS

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "local_steps.py"
local_steps = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
PROBE = probes()["short"]
MEAN = {"rate": 1.0, "momentum": 0.0}  # an outer step that averages the workers


def model(package=ref):
    return package.Transformer.from_weights(PROBE.config, PROBE.weights(), "float64")


def trainers(count, package=ref):
    return [package.Trainer(model(package), PROBE.settings, PROBE.seed) for _ in range(count)]


def batches(count=4):
    return [PROBE.batch(step) for step in range(count)]


def follow(workers, steps, package=ref, **outer):
    """Return the weights after each averaging step."""
    return [*local_steps.train(package, workers, batches(), steps, local_steps.Outer(**outer))]


class Descent:
    """A trainer that uses plain gradient descent."""

    rate = 0.1

    def __init__(self, mesh=None):
        self.model = model()
        self.trainer = ref.Trainer(self.model, PROBE.settings, mesh=mesh)

    def train_step(self, *batch):
        found = self.trainer.gradient(*batch)
        weights = self.model.export_weights()
        ref.set_weights(self.model, {name: weights[name] - self.rate * g for name, g in found.parameters.items()})
        return SimpleNamespace(tokens=int((batch[2] != PROBE.config.pad_id).sum()))


@pytest.mark.parametrize("workers", [2, 4])
def test_one_local_sgd_step_equals_data_parallel_training(workers):
    """Workers have different numbers of tokens, possibly zero, and are weighted by them."""
    ordinary = Descent(mesh=Plan(data=workers))
    for found, batch in zip(follow([Descent() for _ in range(workers)], 1, **MEAN), batches(), strict=True):
        ordinary.train_step(*batch)
        assert_near(found, ordinary.model.export_weights())


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_single_worker_matches_ordinary_training(steps):
    (worker,) = trainers(1)
    found = follow([worker], steps, **MEAN)
    (ordinary,) = trainers(1)
    for batch in batches():
        ordinary.train_step(*batch)
    assert len(found) == 4 // steps
    assert_near(found[-1], ordinary.model.export_weights())
    assert_near(worker.export_state().first_moment, ordinary.export_state().first_moment)


def test_local_steps_and_momentum_change_the_weights():
    one, two, fast = follow(trainers(2), 1, **MEAN), follow(trainers(2), 2, **MEAN), follow(trainers(2), 1)
    assert [len(found) for found in (one, two, fast)] == [4, 2, 4]
    for other in (two, fast):
        distance = max(np.abs(one[-1][name] - other[-1][name]).max() for name in one[-1])
        assert distance > 1e-4


def test_outer_step_matches_the_nesterov_formula():
    """The formula follows Sutskever et al. (2013), shifted by a step; workers are weighted by their tokens."""
    outer, weights, velocity = local_steps.Outer(0.7, 0.9), {"w": np.array([1.0, -2.0])}, np.zeros(2)
    for _ in range(3):
        found = [{"w": weights["w"] - 0.3}, {"w": weights["w"] * 0.5}]
        moved = weights["w"] - (3 * found[0]["w"] + found[1]["w"]) / 4
        velocity = 0.9 * velocity + moved
        expected = weights["w"] - 0.7 * (moved + 0.9 * velocity)
        weights = outer.step(weights, found, [30, 10])
        np.testing.assert_allclose(weights["w"], expected, rtol=1e-14)


@pytest.mark.extended("plans")
def test_outer_step_matches_torch_sgd():
    import torch

    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    descent = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    outer, weights = local_steps.Outer(), {"w": parameter.detach().numpy().copy()}
    for step in range(4):
        moved = np.array([0.1 * step, -0.3])
        parameter.grad = torch.from_numpy(moved)
        descent.step()
        weights = outer.step(weights, [{"w": weights["w"] - moved}], [1])
        np.testing.assert_allclose(weights["w"], parameter.detach().numpy(), rtol=1e-14)


@pytest.mark.extended("plans")
@pytest.mark.parametrize("name", ["torch", "jax", "tf"])
def test_every_backend_takes_the_same_local_steps(name):
    package = PORTS[name].import_package()
    expected = follow(trainers(2), 2)
    for found, right in zip(follow(trainers(2, package), 2, package), expected, strict=True):
        assert_near(found, right, 1e-10)


@pytest.mark.extended("plans")
def test_comparison_trains_and_reports_communication_volume():
    """With K workers, each of them sends 2 (K - 1) / K of the weights per averaging step."""
    runs = local_steps.Comparison("numpy", 2, 4)
    numbers = ref.count_parameters(runs.setup.config)
    assert [runs.sent(count) for count in (1, 2)] == [f"{n * 6 * numbers / 2**20:,.0f}" for n in (2, 1)]
    runs.pairs = runs.pairs[:2]
    for reached in (runs.ordinary(), runs.with_local_steps(2, local_steps.Outer())):
        loss, score = reached
        assert 1.0 < float(loss) < 10.0
        assert score == "0.0%"
