"""Blame, diagnosis, and reproduction of injected bugs in the reference, without any framework."""

from __future__ import annotations

import io
import math
import re
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import reference_numpy
from transformer_parity.engine.findings import AGREES, SKIPPED
from transformer_parity.engine.localization import FINE, INHERITED, INTRODUCED
from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.transformer.bugs.bug import Bug, instead, together
from transformer_parity.transformer.bugs.catalog import FORWARD, TRAINING
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.for_ports import model_cases, port_config
from transformer_parity.transformer.cases.standard import gradient_case, standard_cases
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.diagnose import reproduce
from transformer_parity.transformer.diagnose.candidates import candidate as candidate_module
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate, candidates, content
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY, UNKNOWN, diagnose
from transformer_parity.transformer.diagnose.evidence.blame import Subject, blame, blame_files, distance
from transformer_parity.transformer.diagnose.evidence.properties import is_random
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.explore.view import view_of_case
from transformer_parity.transformer.ports.protocol import Placement, Placements, Result
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import PluginPort, Port
from transformer_parity.transformer.selftest.buggy_ports import injected
from transformer_parity.transformer.stages.training_stage import WHOLE, training_error

CASE = next(case for case in standard_cases() if case.name == "full/padded")
GRADIENTS = gradient_case("paper_base")
ALL = [bug for part in (*FORWARD.values(), *TRAINING.values()) for bug in part]
SCALE, NORM = "encoder.layers.0.self_attention.scores", "encoder.layers.0.self_attention_norm.output"


def named(name: str) -> Bug:
    return next(bug for bug in ALL if bug.name == name)


def numpy(case=CASE, dtype="float64"):
    return PORTS["numpy"].load(case.config, case.load_weights(), Placement(dtype))


class Only:
    """A port that shows only some of its taps, or ignores the values that replace its own."""

    def __init__(self, loaded, taps=None, goes_on=True):
        self.loaded, self.taps, self.goes_on = loaded, taps, goes_on

    def run(self, block, inputs, *, taps, given=None):
        result = self.loaded.run(block, inputs, taps=taps, given=given if self.goes_on else None)
        return replace(result, taps={n: v for n, v in result.taps.items() if self.taps is None or n in self.taps})

    def __getattr__(self, name):
        return getattr(self.loaded, name)


def inject(bug, case=CASE, dtype="float64"):
    """Inject a bug into the reference, and load the reference for a case."""
    return injected(bug, "numpy").load(case.config, case.load_weights(), Placement(dtype))


def blamed(case, loaded, dtype="float64"):
    return blame(loaded, Subject.of(case, "it", dtype))


@pytest.mark.parametrize(("goes_on", "replayed"), [(True, "port"), (False, "reference")])
def test_bug_is_introduced_in_every_layer_and_inherited_downstream(goes_on, replayed):
    found = blamed(CASE, Only(inject(named("scores divided by d_k")), goes_on=goes_on)).blame
    assert found.replayed == replayed
    assert len(found.introduced) == 6
    assert all(name.endswith(".scores") for name in found.introduced)
    marks = {mark.name: mark for mark in found.marks}
    assert marks["encoder.layers.0.self_attention.query"].verdict == FINE
    inherited = marks["encoder.layers.1.self_attention.query"]
    assert (inherited.verdict, inherited.isolated < 1e-13 < inherited.free) == (INHERITED, True)
    assert marks["encoder.layers.1.self_attention.scores"].verdict == INTRODUCED


def test_two_bugs_are_both_marked_as_introduced():
    both = together(named("scores divided by d_k").edits, named("unbiased variance").edits)
    introduced = blamed(CASE, inject(Bug("both", "", both))).blame.introduced
    assert {name.rpartition(".")[2] for name in introduced} == {"scores", "output"}
    assert {SCALE, NORM} <= set(introduced)


def test_blocks_between_two_taps_are_blamed_together():
    shown = ("encoder.layers.0.output", "encoder.layers.1.output", "encoder.output", "decoder.output")
    found = blamed(CASE, Only(inject(named("final norm that is not in the config")), shown)).blame
    assert found.introduced == ["encoder.output"]


def test_blame_without_taps_covers_the_whole_model():
    found = blamed(CASE, Only(inject(named("scores divided by d_k")), ())).blame
    assert (found.replayed, found.introduced) == ("nothing", ["output"])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_nan_is_introduced_at_its_origin_and_inherited_downstream(dtype):
    nan = Bug(
        "nan",
        "",
        {
            "numpy": [
                ("attention", "weights @ value)", "weights @ value * np.where(weights.shape[-1] == 9, 1, np.nan))")
            ]
        },
    )
    # The source has nine positions, so only the decoder's self-attention is affected.
    loaded = Only(inject(nan, dtype=dtype), goes_on=False)
    with np.errstate(all="ignore"):
        found = blamed(CASE, loaded, dtype).blame
    assert found.introduced == ["decoder.layers.0.self_attention.context"]
    assert all(mark.verdict == INHERITED for mark in found.marks[-3:])


def test_lost_precision_is_blamed_in_float32():
    rounded = instead("attention", "weights @ value", "(weights.astype(np.float16) @ value).astype(value.dtype)")
    found = blamed(CASE, inject(Bug("half", "", rounded), dtype="float32"), "float32").blame
    assert {name.rpartition(".")[2] for name in found.introduced} == {"context"}


def test_blame_of_gradients_starts_at_the_logits():
    assert blamed(GRADIENTS, numpy(GRADIENTS)).blame.introduced == []
    loaded = inject(named("softmax passes its gradient through unchanged"), GRADIENTS)
    found = blamed(GRADIENTS, loaded).blame
    assert found.replayed == "reference"
    assert {name.rpartition(".")[2] for name in found.introduced} == {"scores"}
    assert found.introduced[0] == "at decoder.layers.1.cross_attention.scores"
    assert any(mark.verdict == INHERITED for mark in found.marks)


def test_blame_without_taps_locates_only_a_single_wrong_gradient():
    """A bug in the loss makes all gradients wrong, but a single wrong gradient is located at its own parameter."""
    right = {name: value for name, value in tensors(numpy(GRADIENTS), GRADIENTS).items() if not name.startswith("at ")}
    name = "of decoder.layers.1.feed_forward_norm.scale"
    one = {**right, name: right[name] ** 2}
    every = {name: 1.5 * value for name, value in right.items()}
    for actual, introduced in ((right, []), (one, [name]), (every, [])):
        found = blame_files(GRADIENTS, actual, numpy(GRADIENTS), "it").blame
        assert (found.replayed, found.introduced) == ("nothing", introduced)
    assert {mark.verdict for mark in found.marks} == {INHERITED}


def test_rare_differences_between_calls_are_detected_as_random():
    class Seldom:
        calls = 0

        def run(self, block, inputs, taps):
            self.calls += 1
            return Result(np.full(3, float(self.calls == 8)), {})

    assert "two calls on the same input differ" in is_random(Seldom(), CASE)
    assert is_random(numpy(), CASE) == ""


def test_blame_from_files_matches_blame_of_the_port():
    loaded = inject(named("scores divided by d_k"))
    actual = tensors(loaded, CASE)
    assert blame_files(CASE, actual, numpy(), "it").blame.introduced == blamed(CASE, loaded).blame.introduced


def test_block_after_a_wrong_block_is_not_blamed_for_its_padding():
    """Padding keeps the reference's values, so a replayed block combines them with wrong values and differs."""
    case = replace(model_cases(tiny(norm_order="pre", final_norm=True))[0], compares_padding=False)
    name = "decoder.layers.0.output"
    loaded = numpy(case)
    right = tensors(loaded, case)
    wrong = loaded.run(case.block, case.inputs, taps=True, given={name: right[name] ** 2})
    actual = {**wrong.taps, OUTPUT: wrong.output, name: right[name] ** 2}
    assert blame_files(case, actual, loaded, "it").blame.introduced == [name]


def test_context_is_not_blamed_for_keys_hidden_by_the_port():
    """The port adds padding keys that it doesn't show, and attends to them."""
    case = replace(model_cases(tiny())[0], compares_padding=False)
    loaded, block = numpy(case), "encoder.layers.0.self_attention"
    actual = dict(tensors(loaded, case))
    for part in ("weights", "context"):
        actual[f"{block}.{part}"] = 0.5 * actual[f"{block}.{part}"] + (part == "context")
    assert blame_files(case, actual, loaded, "it").blame.introduced[:1] == [f"{block}.weights"]
    assert f"{block}.context" not in blame_files(case, actual, loaded, "it").blame.introduced


def test_context_is_not_blamed_for_weights_at_padding():
    """At padding, the port has values different from the reference's, and it attends to them."""
    case = replace(model_cases(tiny())[0], compares_padding=False)
    loaded, block = numpy(case), "encoder.layers.0.self_attention"
    actual = dict(tensors(loaded, case))
    padding = (case.inputs["source_ids"] == case.config.pad_id)[:, None, :, None]
    value = np.where(padding, 3.0, actual[f"{block}.value"])
    weights = np.full_like(actual[f"{block}.weights"], 1.0 / value.shape[2])
    changed = {"value": value, "weights": weights, "context": weights @ value}
    actual |= {f"{block}.{part}": array for part, array in changed.items()}
    introduced = blame_files(case, actual, loaded, "it").blame.introduced
    assert introduced[0] == f"{block}.weights"
    assert f"{block}.context" not in introduced


def test_weights_are_not_blamed_if_scores_are_masked_before_the_tap():
    """The port's scores are -inf at masked keys, because it applies the mask before the tap."""
    case = replace(model_cases(tiny())[0], compares_padding=False)
    loaded = numpy(case)
    actual = dict(tensors(loaded, case))
    for name in [name for name in actual if name.endswith(".scores")]:
        weights = actual[name.replace(".scores", ".weights")]
        actual[name] = np.where(weights > 0.0, actual[name], -np.inf)
    actual["decoder.layers.1.feed_forward.output"] = 2.0 * actual["decoder.layers.1.feed_forward.output"]
    introduced = blame_files(case, actual, loaded, "it").blame.introduced
    assert not any(name.endswith(".weights") for name in introduced), introduced


def test_gradients_at_padding_counted_by_the_loss_are_inherited():
    case = next(one for one in model_cases(tiny()) if one.name == "gradients/padded")
    case = replace(case, compares_padding=False)
    loaded = numpy(case)
    case_of_all = replace(case, inputs={**case.inputs, "labels": np.full_like(case.inputs["labels"], 5)})
    actual = tensors(loaded, case_of_all)
    assert blame_files(case, actual, loaded, "it").blame.introduced[0] == "at logits"
    assert [name for name in blame_files(case, actual, loaded, "it").blame.introduced if name != "at logits"] == []


def test_distance_is_infinite_for_mismatched_shapes_and_nan():
    one, nan = np.ones(3), np.array([1.0, math.nan, 1.0])
    for actual, expected, far in ((one, one, 0.0), (nan, nan, 0.0), (nan, one, math.inf), (one, one[:2], math.inf)):
        assert distance("x", {"x": actual}, {"x": expected}) == far
    assert distance("x", {}, {"x": one}) == math.inf


@pytest.mark.parametrize(
    "name",
    [
        "scores divided by d_k",
        "no causal mask",
        "epsilon outside the root",
        "first layer used for all layers",
        "W_o transposed",
    ],
)
def test_known_bug_is_identified(name):
    bug = named(name)
    case = next(case for case in standard_cases() if case.name == bug.case)
    found = diagnose(case, tensors(inject(bug, case), case), "it")
    assert (found.confidence, found.candidates) == (EXACT, (name,))
    assert found.error < 1e-12 < 1e-6 < found.next_error
    assert found.sentence.startswith(f"it behaves exactly like the reference with this change: {name} (error ")


@pytest.mark.parametrize(
    ("convert", "name"),
    [
        (
            {"query": "key", "key": "query"},
            "query, key, value weights of all attention blocks loaded from key, query, value",
        ),
        (("query", "key", "value"), "query, key, value kernels of all attention blocks transposed"),
    ],
)
def test_weights_mixed_up_by_a_converter_are_identified(convert, name):
    case = model_cases(tiny(d_v=8))[0]
    mixed = candidate_module._reordered if isinstance(convert, dict) else candidate_module._turned
    weights = mixed(convert, case.load_weights())
    loaded = PORTS["numpy"].load(case.config, weights, Placement("float64"))
    found = diagnose(case, tensors(loaded, case), "it")
    assert (found.confidence, found.candidates) == (EXACT, (name,))


def test_different_convention_is_identified():
    case = model_cases(tiny(d_v=8))[0]
    other = replace(case, config=case.config.replace(position_layout="split", position_timescale="m_minus_1"))
    found = diagnose(case, tensors(numpy(other), case), "it")
    assert found.confidence == EXACT
    assert found.candidates == (
        "position_layout='split', position_timescale='m_minus_1' (the conventions of t2t_2017)",
        *found.candidates[1:],
    )


def test_two_simultaneous_bugs_are_identified():
    both = together(named("scores divided by d_k").edits, named("epsilon outside the root").edits)
    found = diagnose(CASE, tensors(inject(Bug("both", "", both)), CASE), "it")
    assert found.confidence == EXACT
    assert found.candidates == ("scores divided by d_k and epsilon outside the root",)


def test_unlisted_bug_is_diagnosed_as_unknown_or_likely():
    odd = Bug("odd", "", instead("attention", "math.sqrt(d_k)", "(math.sqrt(d_k) + 0.3)"))
    loaded = inject(odd)
    assert diagnose(CASE, tensors(loaded, CASE), "it").confidence == UNKNOWN

    class Port:
        name = "it"

        def load(self, *arguments):
            return loaded

    kept = {}
    setting = Placements(("float64",))
    findings = list(compare([replace(CASE, fast=False)], Port(), setting, kept=kept))
    investigation = Investigation(Port(), setting, "it", view=view_of_case)
    (failure_report,) = investigation.failures(findings, kept, [CASE])
    assert failure_report.diagnosis.confidence == LIKELY
    assert f"at {SCALE}, all values are 0.904105 times the correct ones" in failure_report.diagnosis.sentence
    assert failure_report.view["ports"] == [failure_report.backend] == [Port().name]
    shown = {tap["name"]: tap["ports"][0]["verdict"] for tap in failure_report.view["taps"]}
    assert shown == {mark.name: mark.verdict for mark in failure_report.blame.marks}


def test_correct_port_gets_no_diagnosis():
    found = diagnose(CASE, tensors(numpy(), CASE), "it")
    assert (found.confidence, found.candidates) == (UNKNOWN, ())
    assert found.sentence == "every value that it returned here matches the reference"


def test_candidates_are_distinct_and_differ_from_the_config():
    for stage in ("activations", "gradients", "steps", "decode"):
        known = candidates(CASE.config, stage)
        contents = [repr(content(bug)) for bug in known]
        assert len(set(contents)) == len(contents) > 80
        for bug in known:
            changed = {name for name, value in bug.config.items() if value != getattr(CASE.config, name)}
            assert changed or bug.edits["numpy"] or bug.convert is not dict, bug.name


def test_candidate_does_not_modify_the_reference():
    before = tensors(numpy(), CASE)
    loaded = Candidate((named("scores divided by d_k"),)).load(CASE.config, CASE.load_weights())
    assert loaded.package.__name__.startswith("reference_numpy_edited_")
    assert not np.array_equal(tensors(loaded, CASE)[SCALE], before[SCALE])
    assert np.array_equal(tensors(numpy(), CASE)[SCALE], before[SCALE])


def test_first_wrong_block_is_saved_and_can_be_rerun_alone(tmp_path, monkeypatch):
    loaded = inject(named("scores divided by d_k"))
    evidence = blamed(CASE, loaded)
    directory = reproduce.save(evidence, CASE, "numpy", tmp_path / "failures")
    assert sorted(file.name for file in directory.iterdir()) == ["about.json", "block.safetensors", "model.safetensors"]
    assert len({file.stat().st_mode for file in directory.iterdir()}) == 1  # the umask determines the mode
    block = reproduce.load(directory)
    parent = "inputs/encoder.layers.0.self_attention"
    assert {name for name in block if name.startswith("inputs/")} == {f"{parent}.query", f"{parent}.key"}
    right = block[f"{parent}.query"] @ block[f"{parent}.key"].swapaxes(-1, -2) / math.sqrt(8)
    np.testing.assert_allclose(block["expected"], right, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(block["actual"], right / math.sqrt(8), rtol=1e-12, atol=1e-14)

    lines = []
    assert reproduce.rerun(directory, lines.append) < 1e-15  # the fast code doesn't have the bug
    assert re.match(rf"{re.escape(SCALE)}: error \d\.\de-1[67], was ", lines[0])
    monkeypatch.setattr(reproduce.PORTS["numpy"].__class__, "load", lambda *arguments: loaded)
    assert reproduce.rerun(directory, lines.append) > 0.5
    again = reproduce.save(evidence, CASE, "numpy", tmp_path / "failures")
    assert again == directory
    assert [path.name for path in (tmp_path / "failures").iterdir()] == [directory.name]


def test_wrong_gradient_is_saved_with_its_inputs(tmp_path):
    evidence = blamed(GRADIENTS, inject(named("softmax passes its gradient through unchanged"), GRADIENTS))
    directory = reproduce.save(evidence, GRADIENTS, "numpy", Path(tmp_path))
    parent = "decoder.layers.1.cross_attention"
    read = {name for name in load_file(directory / "block.safetensors") if name.startswith("inputs/")}
    assert read == {f"inputs/at {parent}.weights", f"inputs/{parent}.weights"}
    said = io.StringIO()
    with redirect_stdout(said):
        exec(reproduce.snippet(directory), {})
    assert re.search(r"scores: error \d\.\de-1[56], was ", said.getvalue())  # the fast code doesn't have the bug


def test_zero_gradient_error_is_relative_to_the_total_norm():
    expected = {"at a": np.zeros(2), WHOLE: np.array([3.0, 4.0])}
    assert training_error("at a", {"at a": np.array([5e-12, 0.0])}, expected) == pytest.approx(1e-12)
    assert training_error("at a", {"at a": np.zeros(2)}, expected) == 0.0


class Wrapped(Port):
    """A port of the reference with a bug, which can modify arrays in place or use replaced values at only one tap."""

    taps = ("**",)
    in_place, only = False, None

    def load(self, config, weights, dtype):
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        def show(name, value):
            if name.endswith(".scores") and not self.in_place:
                value = value * 1.25
            seen = tap(name, value)
            if self.only is not None and name != self.only:
                return value
            if self.in_place and name.endswith(".output"):
                kept = seen.copy()
                seen += 1.0  # a port may modify its own arrays
                return kept
            return seen

        return self.model(source_ids, target_ids, tap=show)


class InPlace(Wrapped):
    """A correct port that modifies arrays in place."""

    in_place = True


class GoesOnOnce(Wrapped):
    """A port with wrong scores that uses replaced values at only one tap."""

    only = "encoder.output"


def test_in_place_changes_by_a_port_do_not_alter_recorded_taps():
    port = PluginPort(f"{__name__}:InPlace")
    findings = list(compare(model_cases(port_config(port))[:2], port, Placements(("float64", "float32"))))
    assert {finding.verdict for finding in findings} == {AGREES, SKIPPED}


def test_port_with_partial_tap_replacement_is_replayed_with_the_reference():
    port = PluginPort(f"{__name__}:GoesOnOnce")
    case = model_cases(port_config(port))[0]
    loaded = port.load(case.config, case.load_weights(), Placement("float64"))
    found = blamed(case, loaded).blame
    assert found.replayed == "reference"
    assert {name.rpartition(".")[2] for name in found.introduced} == {"scores"}


def test_candidate_must_hold_in_every_case():
    one, two = model_cases(tiny(d_v=8))[:2]
    other = replace(one, config=one.config.replace(position_offset=1))
    actual = tensors(numpy(other), one)
    assert diagnose(one, actual, "it", others=[(two, None)]).confidence == LIKELY
    both = replace(one, config=one.config.replace(position_offset=1, layer_norm_epsilon=1e-3))
    assert diagnose(one, tensors(numpy(both), one), "it").confidence == EXACT
    alone = diagnose(one, tensors(numpy(both), one), "it", others=[(two, None)])
    # A combination of bugs that fits only one case is weak evidence.
    assert (alone.confidence, alone.candidates) == (UNKNOWN, ())
    there = tensors(numpy(replace(two, config=other.config)), two)
    assert diagnose(one, actual, "it", others=[(two, there)]).confidence == EXACT


def test_candidate_is_compared_only_at_taps_of_the_port():
    one, two = (case for case in model_cases(tiny(d_v=8)) if case.name in ("full/padded", "full/one_token"))
    shown = tensors(inject(named("scores divided by d_k"), one), one)
    few = {name: value for name, value in shown.items() if name in ("encoder.output", "logits", "output")}
    # With one key, wrong scores have no effect on later taps.
    for actual, confidence in ((few, EXACT), (shown, LIKELY)):
        found = diagnose(one, actual, "it", others=[(two, None)])
        assert found.confidence == confidence, found
        assert "scores divided by d_k" in found.sentence


def test_likely_diagnosis_omits_the_description_of_the_error():
    one, two = model_cases(tiny(d_v=8))[:2]
    loaded = inject(named("scores divided by d_k"), one)

    class Port:
        """A port that is wrong in only one case."""

        name = "it"

        def load(self, config, weights, placement):
            return loaded

    findings = list(compare([one], Port(), Placements(("float64",)), kept=(kept := {})))
    findings += [replace(finding, case=two.name, verdict=AGREES) for finding in findings]
    (report,) = Investigation(Port(), Placements(("float64",)), "it").failures(findings, kept, [one, two])
    assert report.diagnosis.confidence == LIKELY
    assert report.diagnosis.sentence.endswith("it behaves like the reference with this change: scores divided by d_k")
    assert not any("times the correct ones" in words for words in report.diagnosis.signatures)


class Withholding(Wrapped):
    """A correct port that shows fewer taps than it declares."""

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids, tap=lambda n, v: v if n.endswith(".scores") else tap(n, v))


def test_missing_taps_are_reported():
    port, kept = PluginPort(f"{__name__}:Withholding"), {}
    cases = model_cases(port_config(port))[:1]
    findings = list(compare(cases, port, Placements(("float64",)), kept=kept))
    (report,) = Investigation(port, Placements(("float64",)), port.reference).failures(findings, kept, cases)
    assert report.diagnosis.sentence.startswith(
        f"the port returned different tensors than it declared: missing {SCALE}"
    )
    assert report.diagnosis.sentence.endswith("every value that Withholding returned here matches the reference")
