"""Agreeing activations and other cases exclude bugs that a diagnosis would otherwise report."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from reference_numpy.embedding import sinusoidal_encoding
from transformer_parity.engine.findings import AGREES, DIVERGES, Finding
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.bugs.catalog import FORWARD
from transformer_parity.transformer.bugs.other_optimizers import MATRICES, decoupled
from transformer_parity.transformer.cases.case import DECODE, STEPS, tiny
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate, candidates
from transformer_parity.transformer.diagnose.candidates.places import Place
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY, UNKNOWN, diagnose
from transformer_parity.transformer.diagnose.files import investigate_files
from transformer_parity.transformer.stages.padding import Read

CONFIG = tiny("paper_base", d_k=None, d_v=None)
CASES = port_cases(CONFIG)
SEARCHES = [case for case in CASES if case.stage == DECODE]
BEAM = next(case for case in SEARCHES if case.name == "decode/port_beam")
STEP_CASES = [case for case in CASES if case.stage == STEPS]


def named(name, stage):
    return Candidate((next(bug for bug in candidates(CONFIG, stage) if bug.name == name),))


def shown(candidate, case):
    return tensors(candidate.load(case.config, case.load_weights()), case)


def only_tokens(arrays):
    return {"tokens": arrays["tokens"]}


@pytest.mark.parametrize("stage", ["gradients", "steps", "decode"])
def test_agreeing_activations_exclude_forward_bugs(stage):
    known = candidates(CONFIG, stage, forward_agrees=True)
    forward = {bug.name for part in FORWARD.values() for bug in part}
    assert known
    assert forward.isdisjoint(bug.name for bug in known)
    assert {name for bug in known for name in bug.config} <= {"label_smoothing", "label_smoothing_kind"}


def test_search_is_not_diagnosed_with_a_forward_bug_if_activations_agree():
    """If activations agree, unscaled scores aren't the cause, even if a search returns exactly their tokens."""
    unscaled = named("scores not scaled", DECODE)
    activations = next(case for case in CASES if case.name == "full/padded")
    wrong = {case.name: only_tokens(shown(unscaled, case)) for case in SEARCHES}

    def finding(case, verdict):
        return Finding(
            "it", "float64", case.component, case.name, "files", "tokens", 1.0, 0.0, verdict, stage=case.stage
        )

    failing = [finding(case, DIVERGES) for case in SEARCHES]
    for findings, name in (([finding(activations, AGREES), *failing], ""), (failing, "scores not scaled")):
        (report,) = investigate_files(findings, SEARCHES, lambda case: wrong[case.name], "it")
        assert name in report.diagnosis.sentence
        assert ("scores not scaled" in report.diagnosis.sentence) == bool(name)


def test_match_in_only_one_of_several_failing_cases_is_not_a_diagnosis():
    early, penalty = named("finished hypotheses continue", DECODE), named("no length penalty", DECODE)
    others = [(case, shown(penalty, case)) for case in SEARCHES if case.options.beam_size and case is not BEAM]
    found = diagnose(BEAM, shown(early, BEAM), "it", known=list(early.parts), others=others)
    assert found.confidence == UNKNOWN
    assert early.name not in found.sentence


def test_match_in_every_failing_case_is_likely_if_other_cases_agree():
    early = named("finished hypotheses continue", DECODE)
    many = [case for case in SEARCHES if case.options.beam_size and case is not BEAM]
    others = [(many[0], shown(early, many[0])), (many[1], None)]
    found = diagnose(BEAM, shown(early, BEAM), "it", known=list(early.parts), others=others)
    assert (found.confidence, found.candidates) == (LIKELY, (early.name,))
    assert found.sentence == (
        f"some decode cases agree; in those that differ, it behaves like the reference with this change: {early.name}"
    )
    # Without scores, a few tokens can match by chance.
    tokens = [(case, arrays and only_tokens(arrays)) for case, arrays in others]
    found = diagnose(BEAM, only_tokens(shown(early, BEAM)), "it", known=list(early.parts), others=tokens)
    assert found.confidence == UNKNOWN


def test_case_that_cannot_show_a_bug_does_not_refute_it():
    clipped = next(case for case in STEP_CASES if case.name == "steps/port_clipped")
    unclipped = next(case for case in STEP_CASES if case is not clipped)
    each = named("every tensor clipped separately", STEPS)
    found = diagnose(clipped, shown(each, clipped), "it", known=list(each.parts), others=[(unclipped, None)])
    assert (found.confidence, found.candidates) == (EXACT, (each.name,))


@pytest.mark.parametrize(("value", "where"), [("0.003", ""), ("0.2", ""), ("0.05", "except for biases and norms")])
def test_decoupled_weight_decay_is_identified_with_its_coefficient(value, where):
    decay = Bug("decay", "", decoupled(value, *([MATRICES] if where else [])))
    case = next(case for case in STEP_CASES if case.name == "steps/port")
    arrays = shown(Candidate((decay,)), case)
    weights = {name: array for name, array in arrays.items() if "moment" not in name}
    found = diagnose(case, weights, "it", known=candidates(CONFIG, STEPS, forward_agrees=True))
    name = f"decoupled weight decay of {value}" + (f", {where}" if where else "")
    assert (found.confidence, found.candidates) == (EXACT, (name,))


def test_embedding_factor_is_measured_separately_from_the_positions():
    case = next(case for case in CASES if case.name == "full/padded")
    tap = "target_embedding.output"
    truth = shown(TRUTH, case)
    encoding = sinusoidal_encoding(truth[tap].shape[1], CONFIG.d_model)
    scaled = math.sqrt(CONFIG.d_k / CONFIG.d_model) * (truth[tap] - encoding) + encoding
    found = diagnose(case, {**truth, tap: scaled, "output": 1.5 * truth["output"]}, "it", known=[])
    assert f"adds positions at {tap}, its embeddings are 0.57735 times the correct ones" in found.sentence
    assert "sqrt(d_model / d_k)" in found.sentence


def test_float32_positional_encodings_are_diagnosed():
    case = next(case for case in CASES if case.name == "full/padded")
    right, wrong = shown(TRUTH, case), dict(shown(TRUTH, case))
    tap = "source_embedding.output"
    encoding = sinusoidal_encoding(right[tap].shape[1], CONFIG.d_model)
    angles = np.arange(len(encoding), dtype=np.float32)[:, None] * np.float32(10000.0) ** (
        -np.arange(12) / np.float32(12)
    )
    waves = np.stack([np.sin(angles.astype(np.float32)), np.cos(angles.astype(np.float32))], -1).reshape(encoding.shape)
    wrong[tap] = right[tap] - encoding + waves.astype(np.float32)
    wrong["output"] = right["output"] * (1.0 + 1e-7)
    found = diagnose(case, wrong, "it", known=[])
    assert (
        found.sentence
        == f"the position encoding that it adds at {tap} has only float32 precision: compute it in float64"
    )
    for other in (right[tap] * (1.0 + 1e-7), right[tap] - encoding):  # the second one adds no encoding at all
        wrong[tap] = other
        assert diagnose(case, wrong, "it", known=[]).confidence == UNKNOWN


def test_bug_is_identified_despite_differences_at_unread_positions():
    case = next(case for case in CASES if case.name == "full/padded")
    outside, right = named("epsilon outside the root", case.stage), shown(TRUTH, case)
    combined = Read.of(case, right).combine(shown(outside, case), right)
    assert any(not np.array_equal(combined[tap], value) for tap, value in shown(outside, case).items())
    found = diagnose(case, combined, "it", known=list(outside.parts))
    assert (found.confidence, found.candidates) == (EXACT, (outside.name,))


def test_location_is_found_despite_differences_at_unread_positions():
    """Merging heads without a transpose mixes positions, so later blocks read values at padding."""
    case = next(case for case in CASES if case.name == "full/padded")
    parts = tuple(f"decoder.layers.{i}.cross_attention" for i in range(CONFIG.num_decoder_layers))
    (bug,) = named("heads merged without a transpose", case.stage).parts
    right, wrong = shown(TRUTH, case), shown(Candidate((bug,), Place("", parts)), case)
    found = diagnose(case, Read.of(case, right).combine(wrong, right), "it", known=[bug])
    assert found.candidates == (f"{bug.name}, in decoder.layers.*.cross_attention only",)


def test_constant_maximum_distance_is_identified_in_a_model_with_relative_positions():
    case = next(case for case in standard_cases() if case.name == "preset/t5")
    far = replace(case, config=case.config.replace(relative_max_distance=128))
    found = diagnose(case, tensors(TRUTH.load(far.config, far.load_weights()), far), "it")
    assert (found.confidence, found.candidates) == (EXACT, ("relative_max_distance=128",))
    tried = {name for bug in candidates(case.config, case.stage) for name in bug.config}
    assert "norm_order" in tried
    assert not any(name.startswith("position_") for name in tried)


def test_bugs_of_t5_are_candidates_only_for_models_with_relative_positions():
    for stage in ("activations", DECODE):
        for preset, is_tried in (("t5", True), ("paper_base", False)):
            names = {bug.name for bug in candidates(tiny(preset), stage)}
            assert ("one bucket too few" in names) == is_tried
            cached = "every step uses the relative positions of the first step"
            assert (cached in names) == (is_tried and stage == DECODE)
