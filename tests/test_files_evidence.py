"""The evidence about tensors from files: names, patterns, factors, and advice."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from transformer_parity.engine.findings import AGREES, DIVERGES, Finding
from transformer_parity.engine.outputs import FILES, Outputs
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.cases.case import DECODE, GRADIENTS, tiny
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.compare.comparator import Comparator
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.diagnose import files as files_module
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate, candidates
from transformer_parity.transformer.diagnose.candidates.places import Place
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, observed
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY
from transformer_parity.transformer.diagnose.evidence.blame import distance
from transformer_parity.transformer.diagnose.evidence.signatures import signatures
from transformer_parity.transformer.diagnose.files import investigate_files
from transformer_parity.transformer.diagnose.measured.schedule import schedule_in_words
from transformer_parity.transformer.golden import compare as golden
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.report.diagnoses import print_failure_report, print_undiagnosed
from transformer_parity.transformer.stages import steps
from transformer_parity.transformer.stages.training_stage import WHOLE

CONFIG = tiny("paper_base", d_k=None, d_v=None)
NAMES = ("full/padded", "full/one_token", "gradients/padded", "gradients/one_token", "steps/port")
KULLBACK_LEIBLER = "Kullback-Leibler divergence as the loss, which subtracts the entropy of the smoothed labels"
SHIFTED = "decoder input shifted right, starting with the last token"
TRIED = (
    KULLBACK_LEIBLER,
    SHIFTED,
    "a loss in bits",
    "label smoothing missing",
    "a backward pass of the norm without the variance term",
    "a ReLU that passes its gradient through everywhere",
    "no gradient through the input of a projection",
    "layer_norm_epsilon=1e-05",
    "a source mask that ends one token too early",
    "weights of the previous layer",
    "kernels of the previous layer",
    "position_offset=1",
    "leaky ReLU with slope 0.01 instead of ReLU",
    "norm multiplied by 1 + scale",
    "weights rounded to bfloat16",
    "cross-attention to the embedded source",
    "no output projection",
    "starts with EOS",
    "length penalty n^alpha",
)
CASES = {case.name: case for case in port_cases(CONFIG) if case.name in NAMES}


def with_bug(name, case, *parts):
    """Return the tensors of a program with a known bug, either in the entire model or in some of its parts."""
    known = next(bug for bug in candidates(CONFIG, case.stage) if bug.name == name)
    place = Place("", parts) if parts else None
    return dict(tensors(Candidate((known,), place).load(case.config, case.load_weights()), case))


def findings_of(files):
    """Yield the comparison of each tensor in each case with the reference's tensor."""
    for name, arrays in files.items():
        case, truth = CASES[name], observed(TRUTH, CASES[name])
        for tap in truth:
            error = 0.0 if tap == WHOLE else distance(tap, arrays, truth)
            verdict = AGREES if error <= 1e-10 else DIVERGES
            yield Finding(
                "mine", "float64", case.component, name, "files", tap, error, 1e-10, verdict, stage=case.stage
            )


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    """Try only some candidates, because trying all of them takes seconds."""
    few = lambda _, stage, **__: [one for one in candidates(CONFIG, stage) if one.name in TRIED]  # noqa: E731
    monkeypatch.setattr(files_module, "candidates", few)


def reports(files):
    files = {name: files.get(name, observed(TRUTH, case)) for name, case in CASES.items() if name in files}
    cases = [CASES[name] for name in files]
    return list(investigate_files(list(findings_of(files)), cases, lambda case: files[case.name], "mine"))


def said(report):
    return " | ".join((report.diagnosis.sentence, *report.diagnosis.signatures))


def in_gradients(change):
    """Return the tensors of both gradient cases, with some of them changed."""
    return {name: {**observed(TRUTH, CASES[name]), **change(CASES[name])} for name in NAMES if "gradients" in name}


def from_bug(name, keep=lambda tap: True, *parts):
    """Return a function that returns a bug's tensors for a case, restricted to the taps that ``keep`` selects."""
    return lambda case: {tap: x for tap, x in with_bug(name, case, *parts).items() if keep(tap)}


def test_loss_in_bits_is_identified_despite_correct_gradients():
    (report,) = reports(in_gradients(from_bug("a loss in bits", lambda tap: tap == "loss")))
    assert (report.diagnosis.confidence, report.diagnosis.candidates) == (EXACT, ("a loss in bits",))
    assert report.diagnosis.sentence.endswith("; only the loss differs, and its gradient is correct")


def test_kullback_leibler_divergence_is_identified():
    (report,) = reports(in_gradients(from_bug(KULLBACK_LEIBLER)))
    assert report.diagnosis.candidates[0] == KULLBACK_LEIBLER


def test_gradient_without_smoothing_is_identified_despite_a_correct_loss():
    (report,) = reports(in_gradients(from_bug("label smoothing missing", lambda tap: tap != "loss")))
    assert report.diagnosis.confidence == EXACT
    assert "label smoothing" in report.diagnosis.candidates[0]
    assert report.diagnosis.sentence.endswith("; only the gradients differ, and the loss is correct")
    assert report.diagnosis.signatures == ()  # it isn't a convention that the config can express


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a backward pass of the norm without the variance term", "decoder.layers.1.feed_forward_norm"),
        ("a ReLU that passes its gradient through everywhere", "encoder.layers.0.feed_forward"),
        ("no gradient through the input of a projection", "decoder.layers.1.cross_attention.key_proj"),
    ],
)
def test_bug_in_one_backward_pass_is_identified_with_its_location(name, part):
    (report,) = reports(in_gradients(from_bug(name, lambda tap: True, part)))
    assert (report.diagnosis.confidence, report.diagnosis.candidates) == (EXACT, (f"{name}, in {part} only",))


def test_wrong_gradient_positions_are_described_in_words():
    def change(case):
        wrong = observed(TRUTH, case)["at logits"].copy()
        wrong[:, 0] *= 3.0
        return {"at logits": wrong}

    (report,) = reports(in_gradients(change))
    assert "in the gradient at logits, among positions 0 to" in said(report)
    assert "at at" not in said(report)
    assert "the loss is correct" in said(report)


def test_patterns_and_factors_of_gradients_are_described():
    def change(case):
        truth = observed(TRUTH, case)
        sentences = len(case.inputs["source_ids"])
        return {tap: x / sentences for tap, x in truth.items() if tap.endswith("key_proj.kernel") and tap[:2] == "of"}

    (report,) = reports(in_gradients(change))
    n = len(CASES["gradients/padded"].inputs["source_ids"])
    assert "the gradient of all kernels of key projections is" in said(report)
    assert f"1 / {n}, as if averaged over {n} sentences" in said(report)


def test_advice_for_a_convention_names_the_files():
    files = {name: with_bug("layer_norm_epsilon=1e-05", CASES[name]) for name in NAMES if "full" in name}
    (report,) = reports(files)
    remedy = report.diagnosis.signatures[0]
    assert (
        "`parity golden --for module:Class --out A`, where the class sets overrides = {'layer_norm_epsilon': 1e-05}"
        in remedy
    )
    assert "declare it: overrides" not in remedy


def test_float64_files_with_float32_precision_are_recognized():
    files = {
        name: {tap: x.astype(np.float32).astype(np.float64) for tap, x in observed(TRUTH, CASES[name]).items()}
        for name in NAMES
        if "full" in name
    }
    (report,) = reports(files)
    assert report.diagnosis.sentence.startswith("float64 was requested, but every value has only float32 precision")


def test_steps_with_wrong_gradients_are_not_diagnosed():
    files = in_gradients(from_bug("a loss in bits"))
    steps = observed(TRUTH, CASES["steps/port"])
    files["steps/port"] = {tap: 1.1 * x for tap, x in steps.items()}
    found = reports(files)
    assert [report.stage for report in found] == [GRADIENTS]
    console = Console(file=io.StringIO(), width=200)
    print_undiagnosed(console, list(findings_of(files)), found)
    said = "mine also differs in steps. Fix its gradients first, then rerun to diagnose the rest."
    assert console.file.getvalue().strip() == said


def test_report_states_that_only_the_loss_differs():
    (report,) = reports(in_gradients(lambda case: {"loss": observed(TRUTH, case)["loss"] * 1.5}))
    console = Console(file=io.StringIO(), width=200)
    print_failure_report(console, report)
    assert "gradients\n" in console.file.getvalue()
    assert "only the loss differs (1.5 times the correct one)" in console.file.getvalue()


def test_dropout_is_recognized_by_scaled_and_zeroed_values():
    rng = np.random.default_rng(0)
    right = rng.normal(size=(4, 3, 7, 8))
    values = right * (rng.random(right.shape) > 0.2) / 0.8
    (found,) = signatures(values, right, CONFIG)
    assert "values are 1.25 = 1 / (1 - 0.2) times the correct ones" in found
    assert found.endswith("the others are zero, as after dropout")
    weights, value = rng.random((4, 3, 7, 6)), rng.normal(size=(4, 3, 6, 8))
    dropped = weights * (rng.random(weights.shape) > 0.1) / 0.9
    (found,) = signatures(dropped @ value, weights @ value, CONFIG)
    assert "vectors are 1.11111 = 1 / (1 - 0.1) times the correct ones, and the others are not" in found


def test_different_tokens_between_steps_are_described_in_words():
    case, truth = CASES["steps/port"], observed(TRUTH, CASES["steps/port"])
    name = next(tap for tap in truth if tap.endswith(" tokens"))
    wrong = {**truth, name: truth[name].copy()}
    wrong[name][1:3, 4] += 1.0
    outputs = Outputs(case.name, "float64", {FILES: wrong})
    findings = Comparator("mine", Placements(("float64",)), Reference()).compare(case, outputs)
    (finding,) = [finding for finding in findings if finding.verdict == DIVERGES]
    assert finding.words == f"2 of {len(truth[name])} sentences have different tokens, starting at token 5"


def test_agreeing_cases_do_not_refute_a_bug_in_differing_cases():
    name = "a source mask that ends one token too early"
    files = {
        "full/padded": with_bug(name, CASES["full/padded"]),
        "full/one_token": observed(TRUTH, CASES["full/one_token"]),
    }
    (report,) = reports(files)
    assert report.diagnosis.confidence in (EXACT, LIKELY)
    assert name in report.diagnosis.sentence


@pytest.mark.parametrize(
    ("name", "parts", "words"),
    [
        ("weights of the previous layer", ["encoder.layers.1.feed_forward"], "encoder.layers.1.feed_forward"),
        ("position_offset=1", ["target_position"], "the decoder"),
        ("leaky ReLU with slope 0.01 instead of ReLU", [], ""),
        ("norm multiplied by 1 + scale", [], ""),
        ("weights rounded to bfloat16", [], ""),
        (SHIFTED, [], ""),
        ("kernels of the previous layer", ["decoder.layers.1.feed_forward"], "decoder.layers.1.feed_forward"),
        ("cross-attention to the embedded source", [], ""),
        (
            "no output projection",
            [f"decoder.layers.{i}.cross_attention" for i in (0, 1)],
            "decoder.layers.*.cross_attention",
        ),
    ],
)
def test_forward_bug_is_identified_with_its_location(name, parts, words):
    files = {case: with_bug(name, CASES[case], *parts) for case in NAMES if "full" in case}
    (report,) = reports(files)
    assert report.diagnosis.confidence == EXACT
    assert report.diagnosis.candidates[0] == (f"{name}, in {words} only" if words else name)


@pytest.mark.parametrize(
    ("name", "is_beam", "keep"),
    [("starts with EOS", False, ["tokens"]), ("length penalty n^alpha", True, ["tokens", "scores"])],
)
def test_search_bug_is_identified_from_tokens_and_scores_in_files(name, is_beam, keep):
    """Files contain tokens of any length, whereas candidates are compared with tokens in a fixed shape."""
    cases = [case for case in port_cases(CONFIG) if case.stage == DECODE and bool(case.options.beam_size) == is_beam]
    known = next(one for one in candidates(CONFIG, DECODE) if one.name == name)

    def searched(case, dtype):
        model = Candidate((known,)).load(case.config, case.load_weights())
        found = model.search(case.inputs["source_ids"], case.options)
        arrays = {"tokens": found.nbest_ids, "scores": found.nbest_scores}
        return {tap: arrays[tap] for tap in keep}

    candidate = SimpleNamespace(cases=cases, tensors=searched, holds=lambda case, dtype: dtype == "float64")
    pair = SimpleNamespace(candidate=candidate, name="", backend="mine")
    place = ("mine", "float64", "decoding")
    wrong = [Finding(*place, case.name, "files", keep[-1], 1.0, 0.0, DIVERGES, stage=DECODE) for case in cases]
    (report,) = golden.investigate(pair, wrong)
    assert report.diagnosis.candidates == (known.name,)


@pytest.mark.parametrize("base", [1000.0, 500000.0])
def test_base_of_the_wavelengths_is_measured(base):
    edits = {"numpy": [("embedding", "10000.0 ** (", f"{base!r} ** (")]}
    files = {}
    for name in ("full/padded", "full/one_token"):
        loaded = Candidate((Bug("base", "", edits),)).load(CONFIG, CASES[name].load_weights())
        files[name] = dict(tensors(loaded, CASES[name]))
    (report,) = reports(files)
    assert report.diagnosis.candidates == (f"a base of {base:g} instead of 10000 in the wavelengths",)


def test_correct_learning_rates_are_not_diagnosed():
    case = CASES["steps/port"]
    rates = [case.training.learning_rate(step, CONFIG.d_model) for step in range(1, 21)]
    assert schedule_in_words(case, rates) == ""
    assert schedule_in_words(case, [2.0 * rate for rate in rates])


def test_learning_rate_is_not_fitted_to_the_loss_before_the_first_update(monkeypatch):
    case, truth = CASES["steps/port"], observed(TRUTH, CASES["steps/port"])
    fitted = []
    monkeypatch.setattr(steps, "rounded_rates", lambda *_: fitted.append(1) or [])
    for name, times in (("step 1 loss", 0), ("step 5 loss", 1)):
        outputs = Outputs(case.name, "float64", {FILES: {**truth, name: 1.1 * truth[name]}})
        findings = Comparator("mine", Placements(("float64",)), Reference()).compare(case, outputs)
        assert [finding.tap for finding in findings if finding.verdict == DIVERGES] == [name]
        assert len(fitted) == times
