"""Run every port, dtype and case against the float64 reference, tap by tap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from numpy import ndarray

from transformer_parity.cases.case import ACTIVATIONS, DECODE, STEPS, Case
from transformer_parity.compare import outputs
from transformer_parity.compare.exceptions import described
from transformer_parity.compare.findings import AGREES, DIVERGES, FAILED, IMPRECISE, SKIPPED, Finding, Kept, Setting
from transformer_parity.compare.near_ties import explain, score, score_tolerance, summary
from transformer_parity.compare.outputs import (
    OUTPUT,
    SCORES,
    TOKENS,
    given,
    name_problem,
    observe_training,
    searched,
    structure_problem,
)
from transformer_parity.compare.tolerances import relative_error, tolerance
from transformer_parity.ports.package import LoadedPackage
from transformer_parity.ports.protocol import Decoded, LoadedPort, MissingAbilityError, Placement, Port, Result
from transformer_parity.ports.registry import PORTS

ROUND_TRIP = "round trip"


@dataclass(frozen=True)
class Expected:
    """What a case must yield in one dtype: the float64 truth, and the reference's own float32 error at each tap."""

    output: ndarray
    taps: dict[str, ndarray]
    baseline: dict[str, float]


def compare(
    cases: Iterable[Case],
    port: Port,
    setting: Setting,
    progress: Callable[[str], None] = lambda text: None,
    kept: Kept | None = None,
) -> Iterator[Finding]:
    """Run every case on a port in every dtype and yield each comparison as it is made.

    Args:
        cases: What to run; cases that share a config and weights are run one after another, on one loaded model.
        port: What to run it on.
        setting: Dtypes, device and precision.
        progress: Told what is about to run.
        kept: Receives all that the port showed in each case in which something failed.
    """
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(_model(case), []).append(case)
    for same_model in groups.values():
        weights = same_model[0].load_weights()
        exact: dict[str, Result] = {}
        for dtype in setting.dtypes:
            runs = [case for case in same_model if dtype in case.dtypes]
            if runs:
                # Only to bfloat16 are weights and inputs rounded beforehand: otherwise the truth is the same.
                known = {} if dtype == "bfloat16" else exact
                yield from _compare_group(runs, port, dtype, setting, given(weights, dtype), progress, kept, known)


def _model(case: Case) -> tuple[Any, ...]:
    """Return what has to be loaded; training changes a model, so what is to take steps is loaded for that alone."""
    return case.config, case.weights_file, case.seed, case.stage == STEPS and case.name


def _compare_group(
    cases: list[Case],
    port: Port,
    dtype: str,
    setting: Setting,
    weights: Mapping[str, ndarray],
    progress: Callable[[str], None],
    kept: Kept | None,
    known: dict[str, Result],
) -> Iterator[Finding]:
    """Load one model and run all cases that use it; ``known`` holds the truth by case, from one dtype to the next."""
    config = cases[0].config

    def failed(case: Case, error: Exception) -> Finding:  # a finding, not a crash of the comparison
        if isinstance(error, MissingAbilityError):
            return _skipped(port.name, dtype, case, "run", str(error))
        message = described(error)
        return Finding(port.name, dtype, case.component, case.name, "run", OUTPUT, math.inf, 0.0, FAILED, message)

    left_out = getattr(port, "left_out", {})
    yield from (_skipped(port.name, dtype, case, "run", left_out[case.name]) for case in cases if case.name in left_out)
    cases = [case for case in cases if case.name not in left_out]
    if not cases:
        return
    progress(f"{dtype} {cases[0].name}")
    truth = PORTS["numpy"].load(config, weights, Placement("float64"))
    same_dtype = PORTS["numpy"].load(config, weights, Placement("float32")) if dtype == "float32" else None
    try:
        loaded = port.load(config, weights, setting.placement(dtype))
        yield _round_trip(port.name, cases[0], loaded, weights, dtype)
    except Exception as error:
        yield from (failed(case, error) for case in cases)
        return

    for case in cases:
        progress(f"{dtype} {case.name}")
        inputs = given(case.inputs, dtype)
        shown: dict[str, ndarray] = {}
        try:
            if case.stage == ACTIVATIONS:
                if case.name not in known:
                    known[case.name] = truth.run(case.block, inputs, taps=True)
                expected = _expect(case.block, inputs, known[case.name], same_dtype)
                findings = _compare_case(case, loaded, inputs, expected, port.name, dtype, setting, shown)
            elif case.stage == DECODE:
                findings = _compare_decoding(case, loaded, inputs, truth, same_dtype, port.name, dtype, shown)
            else:
                findings = _compare_training(case, loaded, inputs, truth, same_dtype, port.name, dtype, shown)
            for finding in findings:
                if kept is not None and finding.verdict not in (AGREES, SKIPPED):
                    kept[case.name, dtype] = shown
                yield finding
        except Exception as error:
            yield failed(case, error)


def _expect(block: str, inputs: Mapping[str, ndarray], exact: Result, same_dtype: LoadedPort | None) -> Expected:
    """Run the reference in the working dtype for the baseline; in float64 it has been run."""
    if not all(np.isfinite(value).all() for value in (exact.output, *exact.taps.values())):
        raise ValueError("the reference itself is not finite here")
    baseline = {}
    if same_dtype is not None:
        rounded = same_dtype.run(block, inputs, taps=True)
        baseline = {name: relative_error(rounded.taps[name], value) for name, value in exact.taps.items()}
        baseline[OUTPUT] = relative_error(rounded.output, exact.output)
    return Expected(exact.output, exact.taps, baseline)


def _compare_case(
    case: Case,
    loaded: LoadedPort,
    inputs: Mapping[str, ndarray],
    expected: Expected,
    backend: str,
    dtype: str,
    setting: Setting,
    shown: dict[str, ndarray],
) -> Iterator[Finding]:
    """Compare every tap, then the output on the fast path."""

    def judge(path: str, tap: str, actual: ndarray, truth: ndarray) -> Finding:
        allowed = tolerance(tap, dtype, expected.baseline.get(tap, 0.0), setting.precision, setting.device)
        problem = structure_problem(actual, truth, dtype)
        error = math.inf if problem else relative_error(actual, truth)
        verdict = AGREES if error <= allowed else DIVERGES if problem or dtype == "float64" else IMPRECISE
        return Finding(backend, dtype, case.component, case.name, path, tap, error, allowed, verdict, problem)

    result = loaded.run(case.block, inputs, taps=True)
    shown.update(result.taps, **{OUTPUT: result.output})
    promised = {tap: truth for tap, truth in expected.taps.items() if loaded.shows(tap)}
    if list(result.taps) != list(promised):
        problem = name_problem(result.taps, promised)
        yield Finding(backend, dtype, case.component, case.name, "taps", "names", math.inf, 0.0, DIVERGES, problem)
    if hidden := len(expected.taps) - len(promised):
        yield _skipped(backend, dtype, case, "taps", f"{hidden} of {len(expected.taps)} taps are not shown")
    for tap, truth in promised.items():
        if tap in result.taps:
            yield judge("taps", tap, result.taps[tap], truth)
    yield judge("taps", OUTPUT, result.output, expected.output)
    if case.fast:
        yield judge("fast", OUTPUT, loaded.run(case.block, inputs, taps=False).output, expected.output)


def _compare_training(
    case: Case,
    loaded: LoadedPort,
    inputs: Mapping[str, ndarray],
    truth: LoadedPort,
    same_dtype: LoadedPort | None,
    backend: str,
    dtype: str,
    shown: dict[str, ndarray],
) -> Iterator[Finding]:
    """Compare loss and gradients, or losses, weights and moments after some steps."""
    expected = observe_training(case, truth, inputs, dtype)
    if not all(np.isfinite(value).all() for value in expected.values()):
        raise ValueError("the reference itself is not finite here")
    rounded = {} if same_dtype is None or case.stage == STEPS else observe_training(case, same_dtype, inputs, dtype)
    baseline = {name: outputs.training_error(name, rounded, expected) for name in rounded}
    actual = observe_training(case, loaded, inputs, dtype)
    shown.update(actual)
    path = "fast" if case.stage == STEPS else "taps"

    def found(name: str, error: float, allowed: float, problem: str = "") -> Finding:
        verdict = AGREES if error <= allowed else DIVERGES if problem or dtype == "float64" else IMPRECISE
        return Finding(backend, dtype, case.component, case.name, path, name, error, allowed, verdict, problem)

    if actual.keys() & {name for name in expected if name.startswith("at ")}:
        promised = {name for name in expected if not name.startswith("at ") or loaded.shows(name.removeprefix("at "))}
        expected = {name: value for name, value in expected.items() if name in promised}
    for what, starts in outputs.OPTIONAL.items():
        names = [name for name in expected if starts(name)]
        if names and not any(name in actual for name in names):  # all or nothing
            yield _skipped(backend, dtype, case, path, f"{len(names)} {what} are not shown")
            expected = {name: value for name, value in expected.items() if name not in names}
    if sorted(actual) != sorted(expected):
        yield found("names", math.inf, 0.0, name_problem(sorted(actual), sorted(expected)))
    for name, value in expected.items():
        if name in actual:
            problem = structure_problem(actual[name], value, dtype if value.ndim else "float64")
            error = math.inf if problem else outputs.training_error(name, actual, expected)
            whole = baseline.get(outputs.WHOLE, 0.0)
            yield found(name, error, outputs.training_tolerance(name, dtype, baseline.get(name, 0.0), whole), problem)


def _compare_decoding(
    case: Case,
    loaded: LoadedPort,
    inputs: Mapping[str, ndarray],
    truth: LoadedPackage,
    same_dtype: LoadedPackage | None,
    backend: str,
    dtype: str,
    shown: dict[str, ndarray],
) -> Iterator[Finding]:
    """Compare the cache, then the tokens that a search finds, then the scores of what it found."""
    options, source_ids = case.search, inputs["source_ids"]
    if options is None:
        raise ValueError(f"case {case.name} has no search options")
    exact, rounded = truth.model, None if same_dtype is None else same_dtype.model

    def judge(path: str, tap: str, error: float, allowed: float, detail: str = "", problem: str = "") -> Finding:
        verdict = AGREES if error <= allowed else DIVERGES if problem or dtype == "float64" else IMPRECISE
        return Finding(backend, dtype, case.component, case.name, path, tap, error, allowed, verdict, problem or detail)

    if options.beam_size is None:  # one position after another must yield what all at once do
        try:
            shown["logits"] = logits = loaded.decode_stepwise(source_ids, inputs["target_ids"])
            whole = exact(source_ids, inputs["target_ids"])
            usual = 0.0 if rounded is None else relative_error(rounded(source_ids, inputs["target_ids"]), whole)
            problem = structure_problem(logits, whole, dtype)
            error = math.inf if problem else relative_error(logits, whole)
            yield judge("cached", "logits", error, tolerance("logits", dtype, usual), "", problem)
        except MissingAbilityError as missing:
            yield _skipped(backend, dtype, case, "cached", str(missing))

    expected = truth.search(source_ids, options)
    found = Decoded.by(partial(loaded.search, source_ids, options))
    ids, scores = found.result.nbest_ids, found.result.nbest_scores
    shown.update(searched(found.result, options))
    shape = (*expected.nbest_ids.shape[:2], *ids.shape[2:])
    problem = "" if ids.shape == shape else f"shape must be {list(shape)}: got {list(ids.shape)}"
    if ids.dtype.kind not in "iu":
        problem = f"tokens must be integers: got {ids.dtype.name}"
    if problem := problem or (structure_problem(scores, expected.nbest_scores, dtype) if scores is not None else ""):
        yield judge("fast", TOKENS, math.inf, 0.0, "", problem)
        return
    doubts = explain(exact, rounded, source_ids, found, expected.nbest_ids, options)
    worst = max(doubts, key=lambda doubt: (not doubt.is_near_tie, doubt.margin), default=None)
    problem = summary(doubts) if worst and worst.margin == math.inf else ""  # which no rounding explains
    yield judge("fast", TOKENS, worst.margin if worst else 0.0, worst.noise if worst else 0.0, summary(doubts), problem)
    if scores is None:
        yield _skipped(backend, dtype, case, "fast", "scores are not shown")
        return
    known = score(exact, source_ids, ids, options)
    usual_scores = None if rounded is None else score(rounded, source_ids, ids, options)
    yield judge("fast", SCORES, relative_error(scores, known), score_tolerance(known, usual_scores))


def _round_trip(backend: str, case: Case, loaded: LoadedPort, weights: Mapping[str, ndarray], dtype: str) -> Finding:
    """Compare the weights that come back with those that were given, bit by bit."""
    try:
        problem = _weights_problem(loaded.export(), weights, dtype)
    except MissingAbilityError as missing:
        return _skipped(backend, dtype, case, "load", str(missing))
    distance, verdict = (math.inf, DIVERGES) if problem else (0.0, AGREES)
    return Finding(backend, dtype, "weights", case.name, "load", ROUND_TRIP, distance, 0.0, verdict, problem)


def _weights_problem(back: Mapping[str, ndarray], weights: Mapping[str, ndarray], dtype: str) -> str:
    if sorted(back) != sorted(weights):
        return name_problem(back, weights)
    for name, array in weights.items():
        wanted = array.astype(dtype)
        if back[name].shape != wanted.shape:
            return f"{name} must come back in the shape {list(wanted.shape)}: got {list(back[name].shape)}"
        if back[name].dtype != wanted.dtype or back[name].tobytes() != wanted.tobytes():
            return f"{name} does not come back as it was given"
    return ""


def _skipped(backend: str, dtype: str, case: Case, path: str, why: str) -> Finding:
    return Finding(backend, dtype, case.component, case.name, path, "", 0.0, 0.0, SKIPPED, why)
