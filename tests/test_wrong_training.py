"""What is said of a port whose loss and gradients are right, and whose learning rate is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose import diagnosis as diagnosis_module
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.templates.other_port import MyPort
from transformer_parity.transformer.ports.user import PluginPort
from transformer_spec.training_config import TrainingConfig

SETTING = Placements(("float64",))


class Cubic(TrainingConfig):
    """A warm-up of its own."""

    def learning_rate(self, step, d_model):
        return 1e-4 * (step / 50) ** 3


class Wrong(MyPort):
    """A small model with a schedule of its own: each hypothesis about it is trained."""

    overrides = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    dtypes = ("float64",)
    schedule = ""

    def start_training(self, settings):
        if self.schedule == "warm-up":
            settings = replace(settings, warmup_steps=4000)
        elif self.schedule == "factor":
            settings = replace(settings, learning_rate_factor=0.37 * settings.learning_rate_factor)
        elif self.schedule == "cubic":
            settings = Cubic(**vars(settings))
        super().start_training(settings)


def diagnosed(schedule):
    Wrong.schedule = schedule
    port, kept = PluginPort(f"{__name__}:Wrong"), {}
    cases = port_cases(port_config(port), ("steps",))
    findings = list(compare(cases, port, SETTING, kept=kept))
    return [report.diagnosis for report in Investigation(port, SETTING, port.reference).failures(findings, kept, cases)]


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("factor", "a learning rate that is 0.37 times as large"),
        pytest.param(
            *("warm-up", "a learning rate that warms up over 4000 steps, in place of 8"),
            marks=pytest.mark.extended("schedules"),
        ),
    ],
)
def test_a_wrong_schedule_is_named(schedule, name):
    (found,) = diagnosed(schedule)
    assert found.confidence == EXACT
    assert name in found.hypotheses


@pytest.mark.extended("schedules")
def test_a_schedule_that_is_not_known_shows_in_how_far_the_weights_move(monkeypatch):
    monkeypatch.setattr(diagnosis_module, "ATTEMPTS", 10)
    (found,) = diagnosed("cubic")
    said = " ".join((found.sentence, *found.signatures))
    assert found.confidence == LIKELY
    assert "step 1 moves every weight the right way and " in said, found
    assert "look at the learning rate, which is settings.learning_rate(step, d_model)" in said


def test_a_right_schedule_is_given_no_diagnosis():
    assert diagnosed("") == []
