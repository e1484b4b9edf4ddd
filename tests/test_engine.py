"""The engine compares any two models with named intermediate values. In these tests, they are chains of blocks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy import ndarray

from transformer_parity.engine.comparison import NAMES, Arrays, Measure, compare_names, compare_tensors, tolerances
from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED, IMPRECISE, SKIPPED, Finding
from transformer_parity.engine.localization import INTRODUCED, PORT, REFERENCE, Blame, Evidence, Replay
from transformer_parity.engine.outputs import OUTPUT, TAPS, MissingAbilityError, Outputs
from transformer_parity.engine.report.result import compared
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tolerances import tolerance
from transformer_parity.engine.verdict import Author, Coverage, Verdict

BLOCKS = ("stem", "body.layers.0.mix", "body.layers.1.mix", "head")
X = np.random.default_rng(1).normal(size=(3, 5))
WEIGHTS = {name: np.random.default_rng([2, i]).normal(size=(5, 5)) for i, name in enumerate(BLOCKS)}


def run(dtype: str = "float64", wrong: Mapping[str, float] | None = None, given: Arrays | None = None) -> Tensors:
    """Run a chain of blocks, optionally with wrong factors for some blocks and given values after some blocks."""
    x, shown = X.astype(dtype), {}
    for name in BLOCKS:
        shown[name] = np.tanh(x @ WEIGHTS[name].astype(dtype)) * np.asarray((wrong or {}).get(name, 1.0), dtype)
        x = np.asarray((given or {}).get(name, shown[name]), dtype)
    return {**shown, OUTPUT: x}


def compare(actual: Tensors, dtype: str = "float64") -> list[Finding]:
    truth, baseline = run(), run("float32") if dtype == "float32" else {}
    author = Author("mine", dtype, "one batch", "chain", "activations")
    names = compare_names(author, TAPS, list(actual), list(truth), ordered=True)
    allowed = tolerances(truth, baseline, dtype)
    common = [name for name in truth if name in actual]
    return [*names, *compare_tensors(author, TAPS, common, actual, truth, allowed, Measure())]


def verdict(findings: list[Finding], dtype: str = "float64") -> Verdict:
    planned = {("activations", dtype): 1}
    return Verdict.of(findings, [Coverage("mine", ("activations",), (dtype,), planned=planned)])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_model_agrees_with_itself(dtype):
    found = compare(run(dtype), dtype)
    assert [finding.tap for finding in found] == [*BLOCKS, OUTPUT]
    assert {finding.verdict for finding in found} == {AGREES}
    assert (verdict(found, dtype).word, verdict(found, dtype).exit_code) == ("AGREE", 0)


def test_wrong_factor_diverges_in_float64():
    found = compare(run(wrong={"body.layers.0.mix": 1.0 + 1e-9}))
    assert next(finding.tap for finding in found if finding.verdict == DIVERGES) == "body.layers.0.mix"
    assert verdict(found).word == "DIVERGE"


def test_float32_tolerance_is_relative_to_the_baseline_error():
    found = compare(run("float32", {"head": 1.0 + 1e-5}), "float32")
    assert {finding.tap for finding in found if finding.verdict == IMPRECISE} == {"head", OUTPUT}
    assert verdict(found, "float32").verdict == FAILED  # distinguishing a bug from rounding requires float64


def test_missing_names_and_wrong_order_diverge():
    shown = run()
    del shown["head"]
    assert [(one.tap, one.detail) for one in compare(shown) if one.verdict == DIVERGES] == [(NAMES, "missing head")]
    turned = dict(reversed(run().items()))
    assert [one.tap for one in compare(turned) if one.verdict == DIVERGES] == [NAMES]


def test_unsupported_outputs_are_skipped_and_incomplete():
    outputs = Outputs("one batch", "float64")

    def refuse() -> Tensors:
        raise MissingAbilityError("it shows nothing")

    outputs.attempt(TAPS, refuse, str)
    author = Author("mine", "float64", "one batch", "chain", "activations")
    found = [author.skipped(path, why) for path, why in outputs.skipped]
    assert [finding.verdict for finding in found] == [SKIPPED]
    assert verdict(found).missing[0] == "mine: activations: nothing was compared (it shows nothing)"
    assert verdict(found).word == "INCOMPLETE"


def located(wrong: Mapping[str, float], *, replays: bool) -> Evidence:
    replay = Replay(
        about=Blame("mine", "float64", "one batch", "activations"),
        truth=lambda given: run(given=given),
        rounded=None,
        tolerance=lambda name, baseline: tolerance(name, "float64", baseline),
    )
    return replay.blocks_of_port(lambda given: run(wrong=wrong, given=given if replays else {}))


@pytest.mark.parametrize("replays", [True, False], ids=["continues with given values", "only reports its values"])
def test_blame_identifies_the_blocks_that_introduce_a_difference(replays):
    evidence = located({"body.layers.0.mix": 1.1, "head": 0.9}, replays=replays)
    assert evidence.blame.introduced == ["body.layers.0.mix", "head"]
    assert evidence.blame.replayed == (PORT if replays else REFERENCE)
    inherited = [mark.name for mark in evidence.blame.marks if mark.verdict != INTRODUCED and mark.free > 1e-3]
    assert inherited == ["body.layers.1.mix", OUTPUT]


def test_engine_result_has_the_keys_common_to_all_commands():
    found = compare(run(wrong={"head": 1.1}))
    result = compared(found, verdict(found))
    assert (result["comparisons"], result["skipped"], result["missing"]) == (5, 0, ())
    assert [row["verdict"] for row in result["summary"]] == [DIVERGES]
    assert [finding["tap"] for finding in result["failures"]] == ["head", OUTPUT]


def test_measure_can_use_a_different_tensor_as_scale():
    class ByTheStem(Measure):
        def error(self, name: str, actual: Arrays, expected: Arrays) -> float:
            return float(np.linalg.norm(actual[name] - expected[name]) / np.linalg.norm(expected["stem"]))

        def problem(self, name: str, actual: ndarray, expected: ndarray, dtype: str) -> str:
            return "it is never right" if name == "head" else super().problem(name, actual, expected, dtype)

    author = Author("mine", "float64", "one batch", "chain", "activations")
    truth = run()
    found = [*compare_tensors(author, TAPS, BLOCKS, run(), truth, tolerances(truth, {}, "float64"), ByTheStem())]
    assert {one.tap: one.verdict for one in found} == dict.fromkeys(BLOCKS[:3], AGREES) | {"head": DIVERGES}
