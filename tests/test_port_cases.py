"""The cases for ports detect every known bug that a port can have, and every candidate can be distinguished."""

from __future__ import annotations

import numpy as np
import pytest
from tiers import first_alone

from transformer_parity.transformer.bugs.candidates.forward import CANDIDATES
from transformer_parity.transformer.bugs.candidates.step_variants import LIMIT_OF_A_SUM
from transformer_parity.transformer.bugs.catalog import EVERYWHERE, SEARCH, STEP_VARIANTS, STRUCTURE, TRAINING
from transformer_parity.transformer.cases import for_ports
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate
from transformer_parity.transformer.diagnose.diagnosis import EXACT, diagnose
from transformer_parity.transformer.diagnose.evidence.blame import distance
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.stages.registry import STAGES

CLIPPED = "clipping", "accumulation"


def load(case):
    return PORTS["numpy"].load(case.config, case.load_weights(), Placement("float64"))


def test_most_likely_weight_seed_is_first_choice_and_fallback(monkeypatch):
    chosen = for_ports._varied_seed.__wrapped__
    assert chosen(CONFIG) == for_ports.LIKELY
    monkeypatch.setattr(for_ports, "ENOUGH", (4,))  # so that no model qualifies
    assert chosen(CONFIG) == for_ports.LIKELY


@pytest.mark.parametrize("shown", ["logits", "taps"])
@pytest.mark.parametrize("bug", EVERYWHERE, ids=lambda bug: bug.name)
def test_bug_in_every_sublayer_is_identified_with_and_without_taps(bug, shown):
    case = next(case for case in standard_cases() if case.name == bug.case)
    seen = tensors(Candidate((bug,)).load(case.config, case.load_weights()), case)
    found = diagnose(case, seen if shown == "taps" else {"output": seen["output"]}, "it")
    assert found.confidence == EXACT
    assert bug.name in found.candidates
    assert shown == "logits" or found.candidates == (bug.name,)


def test_clipped_activation_is_identified():
    relu6 = next(bug for bug in CANDIDATES if bug.name == "ReLU6 instead of ReLU")
    case = next(case for case in port_cases(CONFIG) if case.name == "full/longest/one_sentence")
    found = diagnose(case, tensors(Candidate((relu6,)).load(case.config, case.load_weights()), case), "it")
    assert (found.confidence, found.candidates) == (EXACT, ("ReLU6 instead of ReLU",))


def test_training_before_a_forward_pass_changes_no_weight():
    """The case detects other effects of training, such as dropout that remains enabled."""
    case = next(case for case in port_cases(CONFIG) if case.name == "full/after_training")
    (training,) = case.before
    model, trained = load(case), case.load_weights()
    STAGES["steps"].tensors(training, model)
    assert training.model == case.model
    assert training.config.dropout.residual > 0.0
    assert all(np.array_equal(model.export()[name], trained[name]) for name in trained)


@pytest.mark.parametrize(
    "preset", first_alone(["paper_base", "marian", "bart", "fairseq", "annotated", "torch"], "presets")
)
def test_widest_beam_detects_padding_excluded_before_log_softmax(preset):
    bug = next(one for one in SEARCH if one.name == "padding is excluded before the log-softmax")
    config = tiny(preset, d_k=None, d_v=None)
    case = next(case for case in port_cases(config) if case.name == "decode/many_widest_beam")
    seen = tensors(Candidate((bug,)).load(case.config, case.load_weights()), case)
    assert distance("tokens", seen, tensors(load(case), case)) > 0.0


CONFIG = tiny(d_v=8)
# Bugs that no case for ports detects. Padding is never generated, so the cache contains padding only if sentences start
# with it. Ports don't return scores of tokens, the embeddings have no norm, all layers have self-attention, and the
# positions are not relative.
UNSEEN = [
    "past padding not masked",
    "BOS masked if it is padding",
    "no norm on the embedding",
    "cache of a different layer",
    "scores tokens after EOS",
    "every step uses the relative positions of the first step",
]


@pytest.mark.parametrize("name", sorted({bug.case for bug in SEARCH}))
def test_search_bug_changes_the_values_in_its_case(name):
    case = next(case for case in standard_cases() if case.name == name)
    right = tensors(load(case), case)
    bugs = [bug for bug in SEARCH if bug.case == name and "numpy" in bug.edits]
    seen = {bug.name: tensors(Candidate((bug,)).load(case.config, case.load_weights()), case) for bug in bugs}
    assert [bug.name for bug in bugs if not distance(bug.at, seen[bug.name], right) > 1e-9] == []


def test_port_cases_detect_all_search_bugs_except_the_listed_ones():
    cases = [case for case in port_cases(CONFIG) if case.stage == "decode"]
    right = {case.name: tensors(load(case), case) for case in cases}
    unseen = []
    for bug in SEARCH:
        if "/rules_of_" in bug.case:  # ports don't run these cases
            continue
        for case in cases:
            seen = tensors(Candidate((bug,)).load(case.config, case.load_weights()), case)
            if distance("tokens", seen, right[case.name]) > 0.0:
                break
        else:
            unseen.append(bug.name)
    assert unseen == UNSEEN


SCALED_UP = "small gradients are scaled up to the limit"


def test_clip_norm_of_port_cases_reveals_clipping_of_a_summed_gradient():
    """The gradients of models differ by a factor of 100, so each model requires a different clip norm."""
    (sum_is_clipped,) = (one for one in STEP_VARIANTS if one.name == LIMIT_OF_A_SUM)
    for config in (CONFIG, tiny(d_k=None, d_v=None), tiny("paper_base", d_k=None, d_v=None)):
        (case,) = (case for case in port_cases(config) if case.name == "steps/port/small_gradient")
        wrong, right = (
            tensors(Candidate(parts).load(case.config, case.load_weights()), case) for parts in ((sum_is_clipped,), ())
        )
        assert max(distance(tensor, wrong, right) for tensor in right) > 1e-6


@pytest.mark.parametrize("name", ["ids in int16", *(bug.name for part in CLIPPED for bug in TRAINING[part])])
def test_port_cases_include_large_ids_clipping_and_micro_batches(name):
    cases = {case.name: case for case in port_cases(CONFIG)}
    special = {"ids in int16": "full/large_vocabulary", SCALED_UP: "steps/port/small_gradient"}
    case = cases[special.get(name, "steps/port_clipped")]
    known = {bug.name: bug for part in (STRUCTURE, TRAINING) for each in part.values() for bug in each}
    wrong, right = (
        tensors(Candidate((known[name],)).load(case.config, case.load_weights()), case),
        tensors(load(case), case),
    )
    assert max(distance(tensor, wrong, right) for tensor in right) > 1e-9


def test_overridden_number_of_buckets_uses_the_distance_of_the_preset():
    """The small cases use 8 buckets and a maximum distance of 12, which is too small for more buckets."""
    sizes = [
        (config.relative_buckets, config.relative_max_distance)
        for config in (tiny("t5"), tiny("t5", relative_buckets=32), tiny("t5", relative_max_distance=128))
    ]
    assert sizes == [(8, 12), (32, 128), (8, 128)]


def test_unknown_preset_of_a_port_raises_an_error_that_lists_the_presets():
    with pytest.raises(ValueError, match=r"preset must be one of .*t5_v1_1.*: got 'flan_t5'"):
        tiny("flan_t5")
