"""The learning rate of each step, measured from losses and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from transformer_parity.engine.tensors import Tensors
from transformer_parity.transformer.cases.case import STEPS, Case, tiny
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.diagnose.candidates.candidate import candidates
from transformer_parity.transformer.diagnose.diagnosis import EXACT, diagnose
from transformer_parity.transformer.diagnose.measured.schedule import measured_rates, schedule_in_words
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.rates import scheduled
from transformer_parity.transformer.stages.registry import STAGES

CASE = next(case for case in port_cases(tiny(d_k=None, d_v=None), (STEPS,)) if case.name == "steps/port")


def usual(step: int) -> float:
    """Return the correct learning rate, which is 0 before the first step."""
    return CASE.training.learning_rate(step, CASE.config.d_model) if step else 0.0


def trained(case: Case) -> Tensors:
    """Return the tensors of the reference."""
    loaded = DEFINITION.load(case.config, case.load_weights(), Placement("float64"))
    return STAGES[STEPS].expected(case, loaded, "float64")


def trained_by(rate: Callable[[int], float]) -> Tensors:
    """Return the tensors of the reference, trained with different learning rates."""
    return trained(replace(scheduled(CASE, tuple(rate(step) / usual(step) for step in range(1, 21))), calls=()))


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (lambda step: usual(step - 1), "step n uses settings.learning_rate(n - 1, d_model)"),
        (lambda step: usual(step + 1), "step n uses settings.learning_rate(n + 1, d_model)"),
        (lambda step: 1e-3, "the learning rate of the port is 0.001 in steps 1 to 20"),
        (
            lambda step: 1e-4 if step < 8 else 2e-4,
            "the learning rate of the port is 0.0001 in steps 1 to 7, 0.0002 in steps 8 to 20",
        ),
        (
            lambda step: usual(step) * (1.0 if step <= 10 else 0.5),
            "the learning rate of the port is settings.learning_rate(n, d_model) times 1 in steps 1 to 10, 0.5 in "
            "steps 11 to 20",
        ),
    ],
    ids=[
        "rate of the previous step",
        "rate of the next step",
        "constant",
        "constant in two parts",
        "halved from step 11 on",
    ],
)
def test_learning_rates_are_measured_and_described(rate: Callable[[int], float], words: str) -> None:
    """Losses and weights determine the learning rate of each step."""
    shown = trained_by(rate)
    rates = measured_rates(CASE, shown)
    np.testing.assert_allclose(rates, [rate(step) for step in range(1, 21)], rtol=1e-8, atol=1e-15)
    assert schedule_in_words(CASE, rates) == words


def test_rates_are_measured_across_a_second_start() -> None:
    """The optimizer is replaced after step 7, and its step numbers restart at 1."""
    case = next(one for one in port_cases(tiny(d_k=None, d_v=None), (STEPS,)) if one.restart)
    rates = measured_rates(case, trained(scheduled(case, (0.9,) * 20)))
    words = "the learning rate of the port is settings.learning_rate(n, d_model) times 0.9 in steps 1 to 20"
    assert schedule_in_words(case, rates) == words


def test_correct_learning_rates_before_the_first_wrong_one_are_omitted() -> None:
    """The learning rate stays constant after step 8, so the description omits the correct rates before it."""
    rates = [usual(min(step, 8)) for step in range(1, 21)]
    words = f"the learning rate of the port is correct up to step 8, and {usual(8):.5g} in steps 8 to 20"
    assert schedule_in_words(CASE, rates) == words


def test_schedule_counting_micro_batches_is_identified() -> None:
    """The schedule advances by two for each step, because each step has two micro-batches."""
    case = replace(CASE, settings=replace(CASE.training, accumulation_steps=2))
    rates = [CASE.training.learning_rate(2 * step, CASE.config.d_model) for step in range(1, 21)]
    assert schedule_in_words(case, rates) == "step n uses settings.learning_rate(2 * n, d_model)"


def test_diagnosis_reports_learning_rates_unexplained_by_known_bugs() -> None:
    """The sentence identifies the case in which the learning rates were measured."""
    shown = trained_by(lambda step: usual(step) * (1.0 if step <= 10 else 0.5))
    found = diagnose(CASE, shown, "MyPort", known=candidates(CASE.config, STEPS, forward_agrees=True))
    assert found.confidence == EXACT
    assert found.sentence.startswith(
        "in steps/port, MyPort trains exactly like the reference, except that the learning"
    )


def test_varying_learning_rates_suggest_another_bias_correction() -> None:
    """A step number that is too high by one affects both the learning rate and the bias corrections."""
    rates = [usual(step) * (1.0 + 1.0 / (step + 1)) for step in range(1, 21)]
    words = schedule_in_words(CASE, rates)
    assert words.startswith(
        "the steps of the port are as large as with the learning rates settings.learning_rate(n, d_model) times 1.5 "
        "in step 1"
    )
    assert words.endswith("...: the learning rate or a bias correction differs")


def test_rates_do_not_explain_a_different_optimizer() -> None:
    """Suitable learning rates can reproduce any losses but not all weights."""
    other = replace(CASE, calls=(), settings=replace(CASE.training, beta2=0.99))
    assert measured_rates(CASE, trained(other)) == []


def test_learning_rates_are_not_measured_without_weights_after_the_first_step() -> None:
    """Without weights, a wrong explanation can't be refuted."""
    shown = {name: array for name, array in trained_by(lambda step: 1e-3).items() if " weight " not in name}
    assert measured_rates(CASE, shown) == []


def test_learning_rates_are_not_measured_from_invalid_weights() -> None:
    """Learning rates can't be measured if weights are NaN or have a wrong shape."""
    shown = trained_by(lambda step: 1e-3)
    name = next(name for name in shown if name.startswith("step 20 weight"))
    assert measured_rates(CASE, {**shown, name: shown[name] * np.nan}) == []
    assert measured_rates(CASE, {**shown, name: shown[name][:-1]}) == []
