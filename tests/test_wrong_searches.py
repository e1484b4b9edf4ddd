"""Diagnoses of ports with a correct model and a wrong search: the rule, its parameter, and the kind of search.

The port uses a plain NumPy search without a cache, written independently of the reference's search, with one bug at a
time.
"""

from __future__ import annotations

import numpy as np
import pytest
from tiers import first_alone

import reference_numpy
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.bugs.candidates.search import seen
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.diagnose.candidates import several
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, observed
from transformer_parity.transformer.diagnose.diagnosis import EXACT, diagnose
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.diagnose.measured.search_parameters import Parameter
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.user import PluginPort, Port
from transformer_parity.transformer.stages.registry import STAGES
from transformer_spec.search import Search

SETTING = Placements(("float64",))


@pytest.fixture(autouse=True)
def few_attempts(monkeypatch):
    monkeypatch.setattr(several, "ATTEMPTS", 30)  # fewer combinations of bugs to try if no single bug fits


class Searching(Port):
    """A port that decodes the full prefix for each token and returns hypotheses padded to the maximum length."""

    dtypes = ("float64",)
    bug = ""

    def load(self, config, weights, dtype):
        self.config = config
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype, fast=True)

    def has(self, *bugs):
        return self.bug in bugs

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids)

    def next(self, ids, memory, source_ids):
        logits = self.model.decode(ids.reshape(-1, ids.shape[2]), memory, source_ids)[:, -1]
        logits = logits - logits.max(-1, keepdims=True)
        found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found[:, self.config.pad_id] = -np.inf
        return found.reshape(*ids.shape[:2], -1)

    def generate(self, source_ids, max_length, beam_size, length_penalty):
        if self.has("limit"):
            max_length = min(max_length, source_ids.shape[1] + 1)
        search = self.greedy if beam_size == 1 else self.beam
        return search(source_ids, max_length, beam_size, length_penalty)

    def greedy(self, source_ids, max_length, *_):
        config, memory = self.config, self.model.encode(source_ids)
        start = config.eos_id if self.has("greedy start") else config.bos_id
        ids, done = np.full((len(source_ids), 1, 1), start), np.zeros(len(source_ids), bool)
        for _ in range(max_length):
            token = np.where(done, config.pad_id, self.next(ids, memory, source_ids)[:, 0].argmax(-1))
            ids, done = np.concatenate([ids, token[:, None, None]], 2), done | (token == config.eos_id)
        return ids[:, 0, 1:]

    def beam(self, source_ids, limit, width, alpha):
        config, batch = self.config, len(source_ids)
        width = min(width, 3) if self.has("narrow beam") else width
        alpha = (alpha or 0.6) if self.has("penalty of zero") else alpha
        alpha = min(alpha, 1.0) if self.has("capped penalty") else alpha
        rows = np.arange(batch).repeat(width)
        memory = self.model.encode(source_ids)[np.tile(np.arange(batch), width) if self.has("tiled") else rows]
        start = config.eos_id if self.has("beam start") else config.bos_id
        ids, best_ids = np.full((batch, width, 1), start), np.full((batch, limit), config.pad_id)
        alive, best = np.full((batch, width), -np.inf), np.full(batch, -np.inf)
        alive[:, 0] = 0.0
        for n in range(1, limit + 1):
            totals = (alive[:, :, None] + self.next(ids, memory, source_ids[rows])).reshape(batch, -1)
            order = np.argsort(-totals, axis=1, kind="stable")[:, : 2 * width]
            top, vocabulary = np.take_along_axis(totals, order, 1), totals.shape[1] // width
            longer = np.take_along_axis(ids, (order // vocabulary)[:, :, None], 1)
            longer = np.concatenate([longer, (order % vocabulary)[:, :, None]], 2)
            ends = (longer[:, :, -1] == config.eos_id) | (n == limit)
            scores = np.where(ends, top / ((5.0 + n) / 6.0) ** alpha, -np.inf)[:, :width]
            for row, (score, which) in enumerate(zip(scores.max(1), scores.argmax(1), strict=True)):
                if score > best[row]:
                    best[row], best_ids[row] = score, config.pad_id
                    best_ids[row, :n] = longer[row, which, 1:]
            going = np.where(ends, -np.inf, top)
            order = np.argsort(-going, axis=1, kind="stable")[:, :width]
            alive, ids = np.take_along_axis(going, order, 1), np.take_along_axis(longer, order[:, :, None], 1)
            alive[best >= alive[:, 0] / ((5.0 + limit) / 6.0) ** alpha] = -np.inf
            over = (alive == -np.inf).all(1)
            if over.all() or (over.any() and self.has("one is enough")):
                break
        return best_ids


def said_of(bug):
    globals()["Wrong"] = type("Wrong", (Searching,), {"bug": bug, "__module__": __name__})
    port, kept = PluginPort(f"{__name__}:Wrong"), {}
    every = port_cases(port_config(port), ("activations", "decode"))
    cases = [case for case in every if case.search is not None or case.name == "full/padded"]
    findings = list(compare(cases, port, SETTING, kept=kept))
    return [report.diagnosis for report in Investigation(port, SETTING, port.reference).failures(findings, kept, cases)]


def test_plain_search_without_a_bug_gets_no_diagnosis():
    assert said_of("") == []


NAMES = first_alone(
    [
        ("narrow beam", "a beam size of at most 3"),
        ("penalty of zero", "instead of 0"),
        ("capped penalty", "at most"),
        ("limit", "a maximum length of at most the longest source length plus 1"),
        ("tiled", "memory tiled for the beam, in a search without a cache"),
        ("one is enough", "stops for all sentences when one is finished"),
    ],
    "searches",
)


@pytest.mark.parametrize("named", NAMES)
def test_search_rule_is_identified_with_its_parameter(named):
    bug, name = named
    (found,) = said_of(bug)
    assert found.confidence == EXACT
    assert any(name in one for one in found.candidates), found.candidates


@pytest.mark.parametrize("kind", first_alone(["greedy", "beam"], "searches"))
def test_bug_in_one_kind_of_search_is_attributed_only_to_it(kind):
    (found,) = said_of(f"{kind} start")
    assert found.confidence == EXACT
    assert f"starts with EOS, in {kind} search only" in found.candidates
    assert found.sentence.startswith(f"in {kind} search, Wrong behaves exactly like the reference with this change: ")


def test_window_of_cached_steps_is_measured():
    case = next(case for case in port_cases(tiny("paper_base")) if case.name == "decode/many_greedy")
    window = Candidate((Bug("", "", seen("np.arange(cache.length + 1) > cache.length - 7")),))
    found = diagnose(case, {"tokens": observed(window, case)["tokens"]}, "Wrong", known=[])
    assert found.candidates == ("cached steps that attend to only the last 7 positions",)


def test_ambiguous_parameter_lists_all_values_and_prefers_the_roundest():
    parameter = Parameter(
        "an alpha of {}", {value: {"numpy": [("", "", str(value))]} for value in (0.95, 1.0, 1.05, 2)}
    )
    assert parameter.named([2]).name == "an alpha of 2"
    assert parameter.named([0.95, 2]).name == "an alpha of 0.95 or 2"
    several = parameter.named([0.95, 1.0, 1.05])
    assert (several.name, several.edits["numpy"][0][2]) == ("an alpha of 0.95 to 1.05", "1.0")


@pytest.mark.parametrize("preset", ["paper_base", "marian", "bart", "fairseq", "annotated"])
def test_length_penalty_that_excludes_eos_changes_tokens(preset, monkeypatch):
    plan = Search.plan

    def without_the_end_symbol(*arguments):
        right = plan(*arguments)
        return right._replace(penalties=np.roll(right.penalties, 1))

    searches = [case for case in port_cases(tiny(preset, d_k=None, d_v=None)) if "_beam" in case.name]
    right = [tensors(TRUTH.load(case.config, case.load_weights()), case)["tokens"] for case in searches]
    monkeypatch.setattr(Search, "plan", without_the_end_symbol)
    wrong = [tensors(TRUTH.load(case.config, case.load_weights()), case)["tokens"] for case in searches]
    assert not all(map(np.array_equal, wrong, right))


def test_padding_after_a_hypothesis_does_not_change_the_diagnosis():
    case = next(case for case in port_cases(tiny("paper_base")) if case.name == "decode/many_beam")
    ids = np.array([[[5, case.config.eos_id, case.config.pad_id]], [[5, 6, case.config.eos_id]]])
    shorter, longer = (
        STAGES["decode"].diagnosed(case, {"tokens": np.pad(ids, ((0, 0), (0, 0), (0, more)))})["tokens"]
        for more in (0, 4)
    )
    assert case.config.pad_id == 0
    np.testing.assert_array_equal(shorter, longer)
