"""What is said of a port whose forward is right and whose greedy search is not: a cache, a rule, or both."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tiers import first_alone

import reference_numpy
from transformer_parity.engine.findings import AGREES, SKIPPED
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose import diagnosis as diagnosis_module
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.user import PluginPort, Port

SETTING = Placements(("float64",))


class LatePosition:
    """Positions as a cache counts them that numbers every token behind the first one too high."""

    def __init__(self, position):
        self.position = position

    def __call__(self, x):
        length = x.shape[1]
        shifted = np.arange(length) + (np.arange(length) > 0)
        return x + self.position.vectors(length + 1)[shifted].astype(x.dtype)


class Greedy(Port):
    """A port without beam search, and with some mistakes."""

    dtypes = ("float64",)
    left_out = dict.fromkeys(("decode/port_beam", "decode/many_beam", "decode/many_narrow_beam"), "greedy only")
    mistakes = ()

    def load(self, config, weights, dtype):
        self.config = config
        self.model, self.stepwise = (reference_numpy.Transformer.from_weights(config, weights, dtype) for _ in range(2))
        if "late positions" in self.mistakes:
            self.stepwise.target_position = LatePosition(self.stepwise.target_position)

    def forward(self, source_ids, target_ids, tap):
        logits = self.model(source_ids, target_ids)
        return 1.25 * logits if "scaled logits" in self.mistakes else logits

    def generate(self, source_ids, max_length, beam_size, length_penalty):
        config, memory = self.config, self.model.encode(source_ids)
        ids = np.full((len(source_ids), 1), config.bos_id)
        ended = np.zeros(len(ids), bool)
        while ids.shape[1] <= max_length - ("a token early" in self.mistakes) and not ended.all():
            logits = self.stepwise.decode(ids, memory, source_ids)[:, -1]
            if "padding" not in self.mistakes:
                logits[:, config.pad_id] = -np.inf
            token = np.where(ended, config.pad_id, logits.argmax(-1))
            ended |= token == config.eos_id
            ids = np.concatenate([ids, token[:, None]], 1)
        return ids[:, 1:]


@pytest.fixture(autouse=True)
def few_attempts(monkeypatch):
    monkeypatch.setattr(diagnosis_module, "ATTEMPTS", 30)  # of several mistakes at once, where none fits


def diagnosed(*mistakes, stages=("activations", "decode")):
    """Compare as `parity check` does; return what is said of each stage that fails."""
    globals()["Wrong"] = type("Wrong", (Greedy,), {"mistakes": mistakes, "__module__": __name__})
    port, kept = PluginPort(f"{__name__}:Wrong"), {}
    cases = port_cases(port_config(port), stages)
    findings = list(compare(cases, port, SETTING, kept=kept))
    assert ({finding.verdict for finding in findings} == {AGREES, SKIPPED}) == (not mistakes)
    return [report.diagnosis for report in Investigation(port, SETTING, port.reference).failures(findings, kept, cases)]


def test_a_right_search_is_given_no_diagnosis():
    assert diagnosed() == []


@pytest.mark.parametrize(
    ("mistake", "name"), [("padding", "padding may be generated"), ("a token early", "stops a token early")]
)
def test_the_rule_of_a_search_is_named_and_no_cache(mistake, name):
    (found,) = diagnosed(mistake)
    assert (found.confidence, found.hypotheses[0], found.signatures) == (EXACT, name, ())


@pytest.mark.parametrize("other", first_alone(["late positions", "a token early"], "two mistakes"))
def test_two_mistakes_are_never_exactly_one(other):
    (found,) = diagnosed("padding", other)
    assert found.confidence != EXACT or all(" and " in name for name in found.hypotheses), found
    assert "exactly" not in found.sentence or " and " in found.sentence


SEARCH = r"`forward` agrees with the reference on the tokens that it returns .* but the search does not follow it: "


@pytest.mark.parametrize("mistakes", first_alone([("late positions",), ("padding", "late positions")], "two mistakes"))
def test_a_search_that_does_not_follow_its_own_forward_is_told_so(mistakes):
    (found,) = diagnosed(*mistakes)
    assert found.confidence == LIKELY
    said = " ".join((found.sentence, *found.signatures))
    assert re.search(SEARCH + r"from token \d+ of sentence \d+ on", said), found
    assert "look at the cache" in said


def test_a_search_that_follows_a_wrong_forward_is_not_to_blame():
    (found,) = diagnosed("scaled logits", "late positions", stages=("decode",))
    said = " ".join((found.sentence, *found.signatures))
    assert "`forward` itself differs from the reference" in said, found
    assert "--stage activations" in said
    assert "does not follow" not in said
