"""The requirements for a verdict. Each of these runs once ended with AGREE although it compared nothing meaningful."""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tiers

from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED, IMPRECISE, SKIPPED
from transformer_parity.engine.outputs import FAST, OUTPUT, TAPS, MissingAbilityError, Outputs
from transformer_parity.engine.tensors import digest, relative_error
from transformer_parity.engine.verdict import Coverage, Verdict, decide
from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, tiny
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.check.checked_port import CheckedPort
from transformer_parity.transformer.check.messages import PortJob
from transformer_parity.transformer.check.processes import run_all
from transformer_parity.transformer.check.selection import Selection
from transformer_parity.transformer.compare.comparator import Comparator, compare
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.compare.runner import run_case, run_cases
from transformer_parity.transformer.ports.protocol import Placement, Placements, Result
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.templates.other_port import MyPort
from transformer_parity.transformer.ports.user import PluginPort, Port
from transformer_parity.transformer.stages.registry import STAGES

CASES = {case.name: case for case in standard_cases()}
PADDED = CASES["full/padded"]
HERE = __name__


def outputs_of(case=PADDED, dtype="float64", port="numpy"):
    (found,) = run_cases([replace(case, dtypes=(dtype,))], PORTS[port], [Placement(dtype)], lambda text: None)
    return found


def findings_of(outputs, case=PADDED, reference=None):
    return list(Comparator("it", Placements(), reference or Reference()).compare(case, outputs))


# Comparing a single tensor


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("error", [0.0, math.inf, math.nan])
def test_structural_problem_always_diverges(dtype, error):
    assert decide(error, 1.0, dtype, "shape must be [1]: got [2]") == DIVERGES


@pytest.mark.parametrize("tolerance", [math.inf, math.nan, -1.0])
def test_infinite_nan_and_negative_tolerances_raise_value_error(tolerance):
    with pytest.raises(ValueError, match="a tolerance must be finite and at least 0"):
        decide(math.inf, tolerance, "float32")


def test_nan_error_never_agrees():
    assert [decide(math.nan, 1.0, dtype) for dtype in ("float64", "float32")] == [DIVERGES, IMPRECISE]


def test_shapes_are_never_broadcast():
    with pytest.raises(ValueError, match=r"must have the same shape: got \[1\] and \[3\]"):
        relative_error(np.ones(1), np.ones(3))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: x[:1], "shape must be"),
        (lambda x: x[..., None], "shape must be"),
        (lambda x: x.astype(np.float32), "dtype must be float64: got float32"),
        (lambda x: x.astype(complex), "dtype must be float64: got complex128"),
        (lambda x: x.astype(object), "dtype must be float64: got object"),
        (lambda x: np.full_like(x, np.nan), "values are NaN or infinite"),
        (lambda x: np.where(x > 0, np.inf, x), "values are NaN or infinite"),
    ],
)
@pytest.mark.parametrize("path", [TAPS, FAST])
def test_wrong_structure_diverges(wrong, says, path):
    outputs = outputs_of()
    outputs.paths[path][OUTPUT] = wrong(outputs.paths[path][OUTPUT])
    (finding,) = [finding for finding in findings_of(outputs) if finding.verdict != AGREES]
    assert (finding.path, finding.tap, finding.verdict) == (path, OUTPUT, DIVERGES)
    assert says in finding.detail


class Liar(np.ndarray):
    """An array that compares equal to everything, with any shape and dtype."""

    def __array_function__(self, function, types, arguments, options):
        return True

    def __array_ufunc__(self, function, method, *inputs, **options):
        return np.zeros(())

    shape = property(lambda self: (*PADDED.inputs["target_ids"].shape, 37))


def test_array_subclass_cannot_override_the_comparison():
    class Lying:
        config = PADDED.config

        def run(self, block, inputs, *, taps, given=None):
            return Result(np.zeros((1, 2)).view(Liar), {})

        def shows(self, tap):
            return False

    found = Outputs(PADDED.name, "float64")
    run_case(PADDED, Lying(), found)
    assert {type(value) for tensors in found.paths.values() for value in tensors.values()} == {np.ndarray}
    assert {finding.verdict for finding in findings_of(found)} == {DIVERGES, SKIPPED}


def test_object_arrays_raise_type_error():
    class Holding:
        config = PADDED.config

        def run(self, block, inputs, *, taps, given=None):
            return Result(np.zeros((1, 2), object), {})

        def shows(self, tap):
            return False

    found = Outputs(PADDED.name, "float64")
    run_case(PADDED, Holding(), found)
    assert found.paths == {}
    (path, why), *_ = found.failures
    assert path == TAPS
    assert why.startswith("TypeError: output must contain numbers: got dtype object")


# A reference that overflows


def overflowing(dtype):
    """Return a case whose logits overflow in float32."""
    config = tiny(tie_embeddings="none")
    weights = dict(replace(PADDED, config=config).load_weights())
    weights["output_proj.kernel"] = np.full_like(weights["output_proj.kernel"], 1e38)

    class Case(type(PADDED)):
        def load_weights(self):
            return weights

    fields = {**vars(PADDED), "config": config, "dtypes": (dtype,)}
    return Case(**fields)


@pytest.mark.only("torch")
@pytest.mark.parametrize("garbage", [False, True])
def test_non_finite_baseline_fails_and_names_the_tap(garbage):
    case = overflowing("float32")
    outputs = outputs_of(case, "float32", "torch")
    if garbage:
        outputs.paths[FAST][OUTPUT] = np.arange(3.0)
    failing = [finding for finding in findings_of(outputs, case) if finding.verdict != AGREES]
    assert [finding.verdict for finding in failing] == [FAILED]
    assert failing[0].detail == "the reference is not finite in float32 at logits"
    assert Verdict.of(failing).word == "INCOMPLETE"


def test_weights_that_overflow_float32_agree_in_float64():
    case = overflowing("float64")
    assert {finding.verdict for finding in findings_of(outputs_of(case), case)} == {AGREES}


# The requested stages and dtypes


class NoForward(MyPort):
    def forward(self, source_ids, target_ids, tap):
        raise MissingAbilityError("not here")


class NoGenerate(MyPort):
    generate = Port.generate


class ForwardAlone(MyPort):
    generate, gradients, train_step = Port.generate, Port.gradients, Port.train_step


class SingleOnly(MyPort):
    dtypes = ("float32",)


class OneCase(MyPort):
    config = tiny(d_k=None, d_v=None)  # fixed, so that no search for suitable weights is necessary
    left_out = {case.name: "no time" for case in port_cases(config) if case.name != "full/padded"}


def verdict_of(kind, stages=None, dtypes=None):
    """Return the verdict on a port as ``parity check`` computes it."""
    port = PluginPort(f"{HERE}:{kind.__name__}")
    selection = Selection(backends=(), ports=(port.reference,), dtypes=dtypes, stages=stages)
    cases = port_cases(port_config(port), selection.chosen_stages)
    found = list(compare(cases, port, selection.setting))
    return Verdict.of(found, [selection.asked(port.name, cases, port.kind.dtypes)])


def test_complete_port_agrees():
    assert verdict_of(MyPort) == Verdict(AGREES)


@pytest.mark.parametrize(
    ("kind", "stages", "missing"),
    [
        (NoForward, [ACTIVATIONS], ["activations: nothing was compared (not here)"]),
        (NoGenerate, [DECODE], ["decode: nothing was compared"]),
        (NoGenerate, None, ["decode: nothing was compared"]),
        (ForwardAlone, None, ["gradients: ", "steps: ", "decode: "]),
        (SingleOnly, None, ["gradients: ", "steps: ", "decode: "]),
        (OneCase, [ACTIVATIONS], ["activations: "]),
        (OneCase, None, [f"{stage}: " for stage in STAGES]),
    ],
)
def test_requested_stages_must_have_been_compared(kind, stages, missing):
    verdict = verdict_of(kind, stages)
    assert verdict.word == "INCOMPLETE"
    assert len(verdict.missing) == len(missing)
    for found, said in zip(verdict.missing, missing, strict=True):
        assert found.startswith(f"{kind.__name__}: {said}")


@pytest.mark.parametrize("kind", [ForwardAlone, NoGenerate])
def test_single_stage_can_be_requested(kind):
    assert verdict_of(kind, [ACTIVATIONS]).verdict == AGREES


def test_requested_stage_without_cases_in_a_requested_dtype_is_missing():
    verdict = verdict_of(MyPort, [GRADIENTS], ["float32"])
    said = "no such cases exist; the gradients stage is compared only in float64; remove --dtype, or run --stage"
    assert verdict.missing == (f"MyPort: gradients in float32: {said} gradients --dtype float64 separately",)
    assert verdict.exit_code == 3


@pytest.mark.only("torch")
@pytest.mark.parametrize("dtype", tiers.first_alone(["float32", "bfloat16"], "dtypes"))
def test_stages_without_cases_are_reported_as_missing(dtype, capsys, tmp_path):
    files = {kind: tmp_path / f"result.{kind}" for kind in ("json", "html")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    command = ["check", "--backends", "torch", "--preset", "marian", "--sentences", "0", "--dtype", dtype]
    assert main([*command, "--stage", "gradients", *options]) == 3
    printed = capsys.readouterr().out
    assert f"MISSING   torch: gradients in {dtype}: no such cases exist" in printed
    assert f"gradients in {dtype}" in json.loads(files["json"].read_text())["result"]["missing"][0]
    assert f"gradients in {dtype}: no such cases exist" in files["html"].read_text()


@pytest.mark.only("torch")
def test_steps_stage_with_a_preset_is_rejected(capsys):
    for stages in ("steps", "activations,steps"):
        assert main(["check", "--backends", "torch", "--preset", "marian", "--stage", stages]) == 3
        assert "--preset does not support optimizer steps" in capsys.readouterr().err


def test_weight_round_trip_alone_is_not_a_comparison():
    author = PADDED.author("it", "float64")
    findings = [author.round_trip(""), author.skipped("run", "no forward")]
    assert Verdict.of(findings).word == "INCOMPLETE"
    assert Verdict.of([*findings, author.compared(TAPS, OUTPUT, 0.0, 1.0)]).word == "AGREE"


def test_skipped_cases_do_not_count_as_compared():
    planned = {(ACTIVATIONS, "float64"): 3}
    author = PADDED.author("it", "float64")
    one = author.compared(TAPS, OUTPUT, 0.0, 1.0)
    missing = Coverage("it", (ACTIVATIONS,), planned=planned).missing([one, author.skipped(TAPS, "hidden")])
    assert missing == ["it: activations: only 1 of 3 cases were compared, but at least half are required (hidden)"]


BEAMS = [
    f"decode/{name}"
    for name in ("port_beam", "many_beam", "many_narrow_beam", "many_beam_without_penalty", "many_widest_beam")
]


class GreedyOnly(MyPort):
    """A port without beam search that lists the excluded cases and raises an error for them."""

    left_out = dict.fromkeys(BEAMS, "greedy only")

    def generate(self, source_ids, max_length, beam_size, length_penalty):
        if beam_size > 1:
            raise NotImplementedError("only greedy search")
        return super().generate(source_ids, max_length, beam_size, length_penalty)


class Undeclared(GreedyOnly):
    """A port without beam search that doesn't exclude any cases."""

    left_out = {}


class FirstGreedyOnly(Undeclared):
    """A port without beam search that excludes more than half of the cases."""

    left_out = dict.fromkeys(("decode/many_greedy", "decode/many_greedy_ends"), "too many sentences")


class Misspelt(MyPort):
    """A port that excludes a case that doesn't exist."""

    left_out = {"decode/port_beem": "greedy only"}


def test_port_without_beam_search_can_be_compared():
    assert verdict_of(GreedyOnly, [DECODE]) == Verdict(AGREES)


def test_incomplete_verdict_gives_reasons_of_the_missing_cases():
    assert verdict_of(Undeclared, [DECODE]).exit_code == 3
    (missing,) = verdict_of(FirstGreedyOnly, [DECODE]).missing
    assert missing.startswith("FirstGreedyOnly: decode: only 8 of 20 cases were compared, but at least half are ")
    assert "NotImplementedError: only greedy search" in missing
    assert "too many sentences" in missing
    assert "cache" not in missing


def test_unknown_case_in_left_out_raises_value_error():
    with pytest.raises(
        ValueError,
        match="left_out of Misspelt must contain names of cases: got 'decode/port_beem'; the cases are full/padded",
    ):
        verdict_of(Misspelt)


# The reference runs in a different process


class ExpReplaced(MyPort):
    """A port that modifies ``np.exp``, which would also affect the reference if it ran in the same process."""

    def load(self, config, weights, dtype):
        exp = np.exp
        np.exp = lambda x, *a, **b: exp(x, *a, **b) * (1 + 1e-6)
        super().load(config, weights, dtype)


class NormReplaced(MyPort):
    """A port whose process can't find differences between any two arrays."""

    def load(self, config, weights, dtype):
        np.asarray = lambda x, *a, **b: np.zeros(np.shape(x))
        super().load(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        return super().forward(source_ids, target_ids, tap) * 1.5


@pytest.mark.parametrize("kind", ["ExpReplaced", "NormReplaced"])
def test_port_cannot_modify_the_reference_or_the_comparison(kind):
    port = CheckedPort(PortJob(f"{HERE}:{kind}", Placements(("float64",))), stages=[ACTIVATIONS])
    for _ in run_all([port]):
        pass
    findings = port.findings
    assert Verdict.of(findings).word != "AGREE"


class KeepsItsInputs(MyPort):
    """A port that changes its input arrays in a way that NumPy can't prevent."""

    def forward(self, source_ids, target_ids, tap):
        found = super().forward(source_ids, target_ids, tap)
        ctypes.memset(target_ids.__array_interface__["data"][0], 0, target_ids.nbytes)
        return found


def test_changed_input_is_named_in_the_report():
    port = PluginPort(f"{HERE}:KeepsItsInputs")
    found = list(compare(port_cases(port_config(port), [ACTIVATIONS])[:1], port, Placements(("float64",))))
    named = [finding for finding in found if finding.tap == "target_ids"]
    assert [(finding.verdict, finding.detail) for finding in named] == [(DIVERGES, "the port modifies its input array")]


def test_bfloat16_weights_may_be_exported_as_exact_float32():
    values = np.array([1.5, -(2.0**-7), 2.0**100], np.float32)
    assert digest(values, "bfloat16") == digest(values.astype("bfloat16"), "bfloat16")
    assert digest(values, "float32") != digest(values.astype("bfloat16"), "float32")
    between = np.array([1.5, 0.1, 0.0], np.float32)
    assert digest(between, "bfloat16") == digest(between, "float32")
