"""Training on multiple devices in the reference: a plan changes only the order of sums."""

from __future__ import annotations

import pytest
from conftest import assert_near
from tiers import first_alone

from reference_numpy import Plan, Trainer, Transformer, make_mesh
from transformer_parity.transformer.distributed.cases import PLANS, probes

STEPS = 3


def trainer(probe, **where) -> Trainer:
    """Return a float64 trainer of a fresh model."""
    model = Transformer.from_weights(probe.config, probe.weights(), "float64")
    return Trainer(model, probe.settings, probe.seed, **where)


def numbers(result):
    """Return the results of a step."""
    return [float(number) for number in (result.loss, result.tokens, result.gradient_norm)]


def same(probe, plan, *, dropout="global"):
    """Train on a plan and on one device, and compare everything."""
    one, many = trainer(probe, dropout=dropout), trainer(probe, mesh=make_mesh(plan), dropout=dropout)
    expected, found = one.gradient(*probe.batch(0)), many.gradient(*probe.batch(0))
    assert found.loss == pytest.approx(expected.loss, rel=1e-14)
    assert_near(found.parameters, expected.parameters)
    for step in range(STEPS):
        expected, found = one.train_step(*probe.batch(step)), many.train_step(*probe.batch(step))
        assert numbers(found) == pytest.approx(numbers(expected), rel=1e-13)
        assert expected.gradient_norm > probe.settings.clip_norm  # so that gradients are clipped
    assert_near(many.model.export_weights(), one.model.export_weights())
    assert_near(many.export_state().second_moment, one.export_state().second_moment)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("probe", first_alone(probes().values(), "plans"), ids=lambda probe: probe.name)
def test_every_plan_matches_one_device(probe, plan):
    same(probe, plan)


@pytest.mark.parametrize("name", ["dropout", "vocabulary of 37", "checkpointing"])
def test_uneven_plan_matches_one_device(name):
    same(probes()[name], Plan(data=3, tensor=2))


def test_local_dropout_differs_from_global_dropout():
    probe = probes()["dropout"]
    globally, locally = (trainer(probe, mesh=Plan(data=2), dropout=kind) for kind in ("global", "local"))
    assert abs(globally.gradient(*probe.batch(0)).loss - locally.gradient(*probe.batch(0)).loss) > 1e-3
