"""Tests of the checker itself: it detects and locates each known bug when the bug is injected into a port.

Conversely, correct ports, including those that compute the same values in a different way, pass.
"""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import test_dropout
from conftest import Backend
from misbehaviour import MISBEHAVIOUR, Misbehaviour

from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED, IMPRECISE, Finding
from transformer_parity.engine.tensors import relative_error
from transformer_parity.engine.tolerances import EPS, POLICY, NotFiniteError, tolerance
from transformer_parity.engine.verdict import Verdict
from transformer_parity.transformer.bugs import optimizer, precision, structure, training
from transformer_parity.transformer.bugs.bug import ALL, Bug
from transformer_parity.transformer.bugs.catalog import FORWARD, STRUCTURE, TRAINING, cases
from transformer_parity.transformer.cases import case as case_module
from transformer_parity.transformer.cases.inputs import hard_weights
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.registry import DEFINITION, PORTS
from transformer_parity.transformer.selftest.buggy_ports import injected
from transformer_parity.transformer.selftest.uncompiled import interpreted
from transformer_parity.transformer.stages import gradients, steps
from transformer_parity.transformer.stages.training_stage import WHOLE, training_error

CASES_BY_NAME = cases()
CATALOG = [bug for part in FORWARD.values() for bug in part]
OTHERS = [bug for part in STRUCTURE.values() for bug in part]


def named(name: str) -> Bug:
    return next(bug for bug in CATALOG + OTHERS if bug.name == name)


def in_every_port(bugs: list[Bug] | list[Misbehaviour]) -> list:
    """Return every combination of a bug and a port that it can be injected into, as test parameters."""
    return [
        pytest.param(name, bug, id="-".join([name, *_described(bug)]), marks=pytest.mark.only(name))
        for name in ALL
        for bug in bugs
        if name in bug.edits
    ]


def _described(bug: Bug | Misbehaviour) -> list[str]:
    return [bug.name, bug.case] if isinstance(bug, Bug) else [bug.name]


def in_one_port(bugs: list[Bug]) -> list:
    """Return each bug with the first port that it can be injected into, as test parameters."""
    first = {name: [bug for bug in bugs if next(port for port in ALL if port in bug.edits) == name] for name in ALL}
    return [parameter for name in ALL for parameter in in_every_port(first[name]) if parameter.values[0] == name]


def run(name: str, bug: Bug, case_names: tuple[str, ...], *dtypes: str) -> list[Finding]:
    """Compare a port that contains the bug with the reference."""
    chosen = [CASES_BY_NAME[case_name] for case_name in case_names]
    if name != "torch" and bug.path != "fast":  # because compilation is slow
        chosen = [replace(case, fast=False) for case in chosen]
    port = injected(bug, name)
    with without_compiler(name, bug):
        return list(compare(chosen, port, Placements(dtypes)))


def without_compiler(name: str, bug: Bug):
    """Return a context in which JAX runs one operation at a time, unless the bug is in the compiled path."""
    if name != "jax" or bug.path == "fast":
        return nullcontext()
    import jax

    return jax.disable_jit()


def failing(findings: list[Finding]) -> list[Finding]:
    assert findings
    return [finding for finding in findings if finding.verdict != AGREES]


@pytest.mark.parametrize(("name", "bug"), in_one_port([bug for bug in CATALOG + OTHERS if bug.unseen]))
def test_other_cases_and_dtypes_do_not_detect_the_bug(name, bug):
    """The listed cases and dtypes don't detect the bug, so the bug's own case and dtype are necessary."""
    for where in bug.unseen:
        case, dtype = (bug.case, where) if where in EPS else (where, bug.dtype)
        assert failing(run(name, bug, (case,), dtype)) == []


@pytest.mark.parametrize(("name", "control"), in_every_port(precision.CONTROLS))
@pytest.mark.extended("equivalent mathematics", "jax", "tf")
def test_equivalent_computation_passes_the_check(name, control):
    where, dtypes = ("full/source_all_padding",), ("float64",)
    if name == "torch":  # PyTorch runs these cases quickly
        where, dtypes = ("full/padded", *where, "attention/fully_masked_row"), (*dtypes, "float32")
    assert failing(run(name, control, where, *dtypes)) == []


def run_training(name: str, bug: Bug) -> list[Finding]:
    """Compare a port that contains the bug with the reference, and return the findings that don't agree."""
    snapshots = (1,) if bug.at.startswith("step 1") else (1, 2)
    case = replace(training.CASES.get(bug.case, training.GRADIENTS), snapshots=snapshots)
    port = injected(bug, name)
    with interpreted(name):
        findings = list(compare([case], port, Placements(("float64",))))
    assert len(findings) > 1
    return [finding for finding in findings if finding.verdict != AGREES]


@pytest.mark.parametrize(("name", "control"), in_every_port(optimizer.CONTROLS))
@pytest.mark.extended("equivalent mathematics", "jax", "tf")
def test_equivalent_training_passes_the_check(name, control):
    assert run_training(name, control) == []


RANDOM = (
    "check_seed",
    "check_micro_batches",
    "check_callers_numbers",
)  # each framework implements these features differently


def for_every_check() -> list:
    """Return every combination of a bug and a port. Except in PyTorch, most of them are extended tests."""
    parameters, seen = [], set()
    for parameter in in_every_port(MISBEHAVIOUR):
        name, bug = parameter.values
        shown = bug.check[0] in RANDOM or name == "numpy"
        if name != "torch" and ((name, bug.check[0]) in seen or not shown):
            parameter = pytest.param(
                *parameter.values, id=parameter.id, marks=[*parameter.marks, pytest.mark.extended("bugs")]
            )
        parameters.append(parameter)
        seen.add((name, bug.check[0]))
    return parameters


@pytest.mark.parametrize(("name", "bug"), for_every_check())
def test_misbehavior_is_detected_by_its_check(name, bug):
    check, *arguments = bug.check
    _ = Backend(name).package  # prepares the framework, for example JAX for float64
    backend = Backend(name, injected(Bug(bug.name, "", bug.edits), name).import_package())
    compiled = nullcontext() if check == "check_mixed_precision" else test_dropout.interpreted(backend)
    with compiled, pytest.raises(AssertionError, match=re.escape(bug.complaint)):
        getattr(test_dropout, check)(backend, *arguments)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=pytest.mark.only(name))
        for name, seeds in (("torch", 5), ("jax", 2), ("tf", 2))
        for seed in range(1, 1 + seeds)
    ],
)
@pytest.mark.extended("equivalent mathematics", "tf")
def test_correct_port_passes_all_checks(name, seed, monkeypatch):
    monkeypatch.setitem(case_module.WEIGHTS, "usual", lambda config, _: hard_weights(config, seed))
    findings = list(compare([CASES_BY_NAME["full/padded"]], PORTS[name], Placements(("float64", "float32"))))
    assert failing(findings) == []
    assert {finding.path for finding in findings} == {"load", "taps", "fast"}


def test_every_part_of_model_and_training_has_a_bug_in_every_port():
    for part, bugs in (FORWARD | TRAINING).items():
        assert {name for bug in bugs for name in bug.edits} >= {*ALL}, part


@pytest.mark.only("torch")
def test_missing_key_bias_changes_only_keys_and_scores():
    """A missing key bias shifts all scores of a query equally, which doesn't change weights, logits, or gradients."""
    bug = named("key bias missing")
    failures = failing(run("torch", bug, (bug.case,), "float64"))
    assert {failure.tap.rpartition(".")[2] for failure in failures} == {"key", "scores"}


@pytest.mark.only("torch")
def test_stale_state_between_calls_is_detected():
    failures = failing(run("torch", structure.STALE, ("full/padded", structure.STALE.case), "float64"))
    assert {failure.case for failure in failures} == {structure.STALE.case}
    assert failures[0].tap == structure.STALE.at


def test_reference_agrees_with_itself_and_nan_always_fails():
    case = CASES_BY_NAME["attention/padding"]
    findings = list(compare([case], DEFINITION, Placements(("float64",))))
    assert {finding.error for finding in findings} == {0.0}
    query = case.inputs["query"].copy()
    query[0, 0, 0, 0] = math.nan
    spoilt = replace(case, inputs={**case.inputs, "query": query})
    failures = failing(list(compare([spoilt], PORTS["numpy"], Placements(("float64", "float32")))))
    assert {(failure.verdict, failure.error) for failure in failures} == {(FAILED, math.inf)}
    assert {failure.detail for failure in failures} == {"the reference is not finite in float64 at weights"}


def test_port_load_failure_fails_every_case():
    class Nothing:
        name = "nothing"

        def load(self, *arguments):
            raise RuntimeError("out of memory")

    findings = list(
        compare([CASES_BY_NAME["full/padded"], CASES_BY_NAME["full/one_token"]], Nothing(), Placements(("float64",)))
    )
    assert [(finding.case, finding.verdict) for finding in findings] == [
        ("full/padded", FAILED),
        ("full/one_token", FAILED),
    ]
    assert all(finding.detail.startswith("RuntimeError: out of memory (test_mutants.py, line ") for finding in findings)


EXITS = [
    ([], 3),
    ([AGREES], 0),
    ([AGREES, IMPRECISE], 2),
    ([IMPRECISE, DIVERGES, AGREES], 1),
    ([AGREES, FAILED], 3),
    ([IMPRECISE, FAILED], 3),
    ([FAILED, DIVERGES, IMPRECISE], 1),
]


@pytest.mark.parametrize(("verdicts", "code"), EXITS)
def test_exit_code_follows_the_worst_verdict(verdicts, code):
    place = ("torch", "float64", "", "", "taps", "logits", 0.0, 1.0)
    findings = [Finding(*place, verdict, "", "activations") for verdict in verdicts]
    assert Verdict.of(findings).exit_code == code


@pytest.mark.only("torch")
@pytest.mark.parametrize(
    ("bug", "dtypes", "code"),
    [
        ("scores not scaled", ("float64",), 1),
        ("scores in TensorFloat32", ("float64", "float32"), 2),
        ("scores in TensorFloat32", ("float32",), 3),  # without float64, the cause is unknown
        ("scores not scaled", ("float32",), 3),
        ("an exception", ("float64",), 3),
    ],
)
def test_exit_code_depends_on_the_bug_and_dtypes(bug, dtypes, code):
    bug = named(bug)
    assert Verdict.of(run("torch", bug, (bug.case,), *dtypes)).exit_code == code


def test_check_without_comparisons_does_not_pass():
    assert Verdict.of(compare([], PORTS["numpy"], Placements())).exit_code == 3
    left_out = replace(CASES_BY_NAME["full/padded"], dtypes=("float64",))
    assert Verdict.of(compare([left_out], PORTS["numpy"], Placements(("bfloat16",)))).exit_code == 3


def test_relative_error_uses_the_norm_without_overflow():
    assert relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == 0.1
    assert relative_error(np.zeros(3), np.zeros(3)) == 0.0
    assert relative_error(np.full(3, 1e-100), np.zeros(3)) == math.inf
    assert relative_error(np.zeros(3), np.ones(3)) == 1.0
    large = np.full(3, 1e30, np.float32)  # their squares overflow in float32
    assert relative_error(2.0 * large, large) == 1.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_non_finite_values_exceed_every_tolerance(wrong):
    array = np.array([1.0, wrong])
    with np.errstate(invalid="ignore"):
        for actual, expected in ((array, np.ones(2)), (np.ones(2), array), (array, array)):
            assert not relative_error(actual, expected) <= 1e6
    with pytest.raises(NotFiniteError, match="the reference is not finite in float32 at logits"):
        tolerance("logits", "float32", wrong)


def test_tolerances_match_the_listed_values():
    """The tolerances are repeated here, so that nobody can relax one by accident."""
    assert POLICY == {
        "float64": {"tap": 1e-12},
        "float32": {"ratio": 4.0, "floor_in_eps": 4.0},
        "tensorfloat32": {"eps": 2.0**-10},
        "bfloat16": {"tap": 0.06, "scores": 0.16, "weights": 0.16, "loss": 1e-5},
        "gradients": {
            "float64": {"loss": 1e-13, "whole": 1e-11, "tensor": 1e-10},
            "float32": {"ratio": 4.0, "floor_in_eps": 4.0},
        },
        "pair": {
            "float64": {"ratio": 16.0, "floor": 1e-12, "most": 1e-4},
            "rounded": {
                "ratio": 4.0,
                "floor_in_eps": 4.0,
                "if_float64_agrees": 4.0,
                "most": {"float32": 0.02, "float16": 0.2, "bfloat16": 0.5},
            },
        },
        "decode": {"float64": {"score": 1e-12, "tie": 1e-12}, "float32": {"ratio": 4.0, "floor_in_eps": 4.0}},
        "steps": {
            "float64": {"loss": 1e-10, "tensor": 1e-10, "rate": 5e-7},
            "float32": {"loss": 1e-5, "tensor": 1e-3},
        },
        "distributed": {"mixed_bfloat16": {"ratio": 4.0, "floor_in_eps": 4.0}},
        "bench": {"loss": 1e-4, "loss_bfloat16": 6e-2, "decision_bfloat16": 4.0, "loss_with_dropout": 1e-1},
    }
    assert [EPS[dtype] for dtype in ("float64", "float32", "bfloat16")] == [2.0**-52, 2.0**-23, 2.0**-7]
    assert tolerance("encoder.output", "float64", baseline=1.0) == 1e-12
    assert tolerance("encoder.output", "float32", baseline=0.0) == 4.0 * 2.0**-23
    assert tolerance("encoder.output", "float32", baseline=1e-6) == 4e-6 + 4.0 * 2.0**-23
    assert tolerance("encoder.output", "float32", 1e-6, "fast", "cpu") == tolerance("encoder.output", "float32", 1e-6)
    assert tolerance("encoder.output", "float32", 0.0, "fast", "gpu") == 4.0 * 2.0**-10
    assert tolerance("encoder.output", "float64", 0.0, "fast", "gpu") == 1e-12
    for tap, allowed in (
        ("encoder.output", 0.06),
        ("logits", 0.06),
        ("a.scores", 0.16),
        ("weights", 0.16),
        ("loss", 1e-5),
    ):
        assert tolerance(tap, "bfloat16", baseline=1.0) == allowed


@pytest.mark.parametrize(
    ("name", "dtype", "allowed"),
    [
        ("loss", "float64", 1e-13),
        (WHOLE, "float64", 1e-11),
        ("of output_proj.bias", "float64", 1e-10),
        ("at logits", "float64", 1e-10),
        ("step 20 loss", "float64", 1e-10),
        ("step 20 weight output_proj.bias", "float64", 1e-10),
        ("loss", "float32", 4e-6 + 4.0 * 2.0**-23),
        (WHOLE, "float32", 4e-6 + 4.0 * 2.0**-23),
        ("of output_proj.bias", "float32", 8e-6 + 4.0 * 2.0**-23),  # at least the full gradient's tolerance
        ("step 5 loss", "float32", 1e-5),
        ("step 5 weight output_proj.bias", "float32", 1e-3),
    ],
)
def test_training_tolerances_match_the_listed_values(name, dtype, allowed):
    of_steps = name.startswith("step ")
    found = steps.tolerance(name, dtype) if of_steps else gradients.tolerance(name, dtype, baseline=1e-6, whole=2e-6)
    assert found == pytest.approx(allowed, rel=1e-12)


def test_key_bias_error_is_relative_to_the_query_bias():
    expected = {"of a.key_proj.bias": np.full(2, 1e-17), "of a.query_proj.bias": np.array([3.0, 4.0])}
    actual = {"of a.key_proj.bias": np.array([0.5, 0.0]) + 1e-17, "of a.query_proj.bias": np.array([3.0, 4.5])}
    assert training_error("of a.key_proj.bias", actual, expected) == pytest.approx(0.1)
    assert training_error("of a.query_proj.bias", actual, expected) == pytest.approx(0.1)
    assert training_error("of a.key_proj.bias", expected, expected) == 0.0


def test_ratio_divides_the_error_by_the_tolerance():
    finding = Finding("torch", "float64", "", "", "taps", "logits", 5e-13, 1e-12, AGREES)
    assert finding.ratio == 0.5
    assert finding.to_dict()["ratio"] == 0.5
    assert replace(finding, error=0.0, tolerance=0.0).ratio == 0.0
    assert replace(finding, tolerance=0.0).ratio == math.inf
