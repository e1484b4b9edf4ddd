"""Bugs that are limited to one module are located there, and the diagnosis states the location."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from transformer_parity.transformer.bugs.catalog import EVERYWHERE
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.for_ports import model_cases
from transformer_parity.transformer.cases.standard import gradient_case, standard_cases
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.diagnose import diagnosis
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate, candidates
from transformer_parity.transformer.diagnose.candidates.places import Place, intervals, placed
from transformer_parity.transformer.diagnose.candidates.trials import Trials
from transformer_parity.transformer.diagnose.diagnosis import EXACT, UNKNOWN, diagnose
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION

CASE = next(case for case in standard_cases() if case.name == "full/padded")
PRE = next(
    case for case in model_cases(tiny("paper_base", norm_order="pre", final_norm=True)) if case.stage == CASE.stage
)
SQUARE = next(case for case in model_cases(tiny("paper_base", d_k=None, d_v=None)) if case.stage == CASE.stage)
SWAPPED = "query, key, value weights loaded from key, query, value"


def usual(case):
    return DEFINITION.load(case.config, case.load_weights(), Placement("float64"))


def limited(case, name, *parts):
    """Return the reference's tensors with a bug in only some parts."""
    # Two bugs may have the same name. The bugs in EVERYWHERE come last, so they override bugs with the same name. Only
    # the bugs in EVERYWHERE can be limited to some parts.
    known = {bug.name: bug for bug in (*reversed(candidates(case.config, case.stage)), *EVERYWHERE)}
    return tensors(Candidate((known[name],), Place("", parts)).load(case.config, case.load_weights()), case)


def every(case, stack, *names):
    layers = range(getattr(case.config, f"num_{stack}_layers"))
    return [f"{stack}.layers.{i}.{name}" for i in layers for name in names]


BUGS = [
    (CASE, "epsilon outside the root", ["decoder.layers.1.feed_forward_norm"], "decoder.layers.1.feed_forward_norm"),
    (
        CASE,
        "layer_norm_epsilon=1e-05",
        every(CASE, "encoder", "self_attention_norm", "feed_forward_norm"),
        "the encoder",
    ),
    (
        CASE,
        "unbiased variance",
        every(CASE, "decoder", "cross_attention_norm"),
        "decoder.layers.*.cross_attention_norm",
    ),
    (PRE, "final_norm=False", ["decoder.final_norm"], "the decoder"),
    (
        CASE,
        f"{SWAPPED.replace(' loaded', ' of all attention blocks loaded')}",
        every(CASE, "decoder", "self_attention"),
        "decoder.layers.*.self_attention",
    ),
    (
        CASE,
        "heads merged without a transpose",
        every(CASE, "decoder", "cross_attention"),
        "decoder.layers.*.cross_attention",
    ),
    (CASE, "scores not scaled", ["decoder.layers.0.self_attention"], "decoder.layers.0.self_attention"),
    (CASE, "no residual connections", ["encoder.layers.1"], "encoder.layers.1"),
    (PRE, "no residual connections in pre-norm", ["decoder.layers.0"], "decoder.layers.0"),
    (CASE, "scale_embedding=False", ["target_embedding"], "the decoder"),
    (CASE, "no causal mask", ["decoder.layers.1"], "decoder.layers.1.self_attention"),
    # Common bugs in published ports, each in one module.
    (CASE, "activation='gelu'", ["decoder.layers.1.feed_forward"], "decoder.layers.1.feed_forward"),
    (CASE, "position_offset=2", ["source_position"], "the encoder"),
    (
        SQUARE,
        "packed projections split by head",
        ["encoder.layers.0.self_attention"],
        "encoder.layers.0.self_attention",
    ),
    (SQUARE, "W_o transposed", ["decoder.layers.1.cross_attention"], "decoder.layers.1.cross_attention"),
    (CASE, "missing norm", ["encoder.layers.1.feed_forward_norm"], "encoder.layers.1.feed_forward_norm"),
    (
        CASE,
        "a norm without its bias",
        every(CASE, "decoder", "cross_attention_norm"),
        "decoder.layers.*.cross_attention_norm",
    ),
    (CASE, "all masks ignored", ["decoder.layers.1.self_attention"], "decoder.layers.1.self_attention"),
]


def check_name(case, name, parts, words, shown=()):
    actual = limited(case, name, *parts)
    found = diagnose(case, {tap: actual[tap] for tap in shown or actual}, "it")
    assert found.confidence == EXACT, found.sentence
    plain = name.replace(" of all attention blocks", "")
    assert f"{plain}, in {words} only (" in found.sentence


@pytest.mark.parametrize(("case", "name", "parts", "words"), BUGS)
def test_local_bug_is_identified_with_its_location(case, name, parts, words):
    check_name(case, name, parts, words)


@pytest.mark.parametrize(("case", "name", "parts", "words"), BUGS[:4])
def test_local_bug_is_identified_without_taps(case, name, parts, words):
    check_name(case, name, parts, words, ["output"])


def test_local_bug_is_identified_with_few_taps():
    check_name(*BUGS[6], ["encoder.output", "decoder.output", "output"])


@pytest.mark.parametrize("name", ["norm before the sum", "no residual connections", "normalized twice"])
def test_residual_bug_is_limited_to_one_sublayer(name):
    known = [bug for bug in candidates(CASE.config, CASE.stage) if bug.name.startswith(name)]
    every_place = [one for bug in known for one in placed(bug, CASE.config, CASE.load_weights(), [])]
    bug, place = next(one for one in every_place if one[1].words == "decoder.layers.1.cross_attention")
    wrong = tensors(Candidate((bug,), place).load(CASE.config, CASE.load_weights()), CASE)
    right = tensors(usual(CASE), CASE)
    differing = [tap for tap in right if not np.array_equal(right[tap], wrong[tap])]
    assert differing[0].startswith("decoder.layers.1.cross_attention")
    found = diagnose(CASE, wrong, "it")
    assert f"{name}, in decoder.layers.1.cross_attention only" in found.sentence


def test_frozen_norm_of_one_layer_is_identified_by_its_gradients():
    case = gradient_case("paper_base")
    part = "encoder.layers.0.feed_forward_norm"
    found = diagnose(case, limited(case, "norms are frozen", part), "it")
    assert f"norms are frozen, in {part} only" in found.sentence


def test_available_taps_narrow_the_possible_locations():
    taps = intervals(["encoder.output"], ["encoder.output", "decoder.output", "output"], CASE.config)
    known = {bug.name: bug for bug in candidates(CASE.config, CASE.stage)}
    found = [place.words for _, place in placed(known["no activation"], CASE.config, CASE.load_weights(), taps)]
    assert found == ["the encoder", "encoder.layers.0.feed_forward", "encoder.layers.1.feed_forward"]


def test_bug_with_a_single_location_has_no_variants():
    known = {bug.name: bug for bug in candidates(CASE.config, CASE.stage)}
    for name in ("encoder without padding mask", "key bias of another layer", "tensor2tensor"):
        for bug in (bug for full, bug in known.items() if full.startswith(name)):
            assert list(placed(bug, CASE.config, CASE.load_weights(), [])) == []


def test_number_of_tried_locations_is_limited(monkeypatch):
    config = CASE.config.replace(num_encoder_layers=6, num_decoder_layers=6)
    case, tried = replace(CASE, config=config), []
    wrong = {"output": tensors(usual(case), case)["output"] + 1.0}
    monkeypatch.setattr(diagnosis, "PLACED", 50)
    run = Trials.run
    monkeypatch.setattr(Trials, "run", lambda trials, one: tried.append(one.place) or run(trials, one))
    known = [bug for bug in candidates(config, case.stage) if bug.name == "epsilon outside the root"]
    assert diagnose(case, wrong, "it", known=known).confidence == UNKNOWN
    number = len([place for place in tried if place])
    assert number == len(list(placed(known[0], config, case.load_weights(), [])))
    monkeypatch.setattr(diagnosis, "PLACED", 5)
    tried.clear()
    assert diagnose(case, wrong, "it", known=known).confidence == UNKNOWN
    assert 5 <= len([place for place in tried if place]) < number
