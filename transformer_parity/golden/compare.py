"""Compare two folders of golden vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy import ndarray

from reference_numpy.search_plan import SearchResult
from reference_numpy.transformer import Transformer
from transformer_parity.cases.case import ACTIVATIONS, DECODE, GRADIENTS, Case
from transformer_parity.compare import outputs
from transformer_parity.compare.findings import (
    AGREES,
    DIVERGES,
    FAILED,
    IMPRECISE,
    SKIPPED,
    Finding,
)
from transformer_parity.compare.near_ties import explain, score, score_tolerance, summary
from transformer_parity.compare.outputs import SCORES, TOKENS, name_problem, structure_problem
from transformer_parity.compare.tolerances import relative_error, tolerance
from transformer_parity.diagnose.investigate import FailureReport, investigate_files
from transformer_parity.golden import format
from transformer_parity.golden.format import DTYPES, Folder
from transformer_parity.ports.protocol import Decoded

FILES = "files"  # the path of a finding: neither with taps on nor fast, but as somebody wrote it down
Tensors = Mapping[str, ndarray]


def folder_pairs(truth: Path, judged: Path) -> dict[str, tuple[Folder, Folder]]:
    """Read both sides, one folder each or several of the same names."""
    ours, theirs = format.find(truth), format.find(judged)
    if ours.keys() != theirs.keys():
        held = [", ".join(filter(None, found)) or "golden vectors of one model" for found in (ours, theirs)]
        raise ValueError(f"both must hold the same models: {truth} holds {held[0]}, and {judged} holds {held[1]}")
    return {name: (format.read(ours[name]), format.read(theirs[name])) for name in ours}


def investigate(findings: Sequence[Finding], judged: Folder) -> list[FailureReport]:
    """Blame and diagnose by the tensors that were written down, where there are enough of them."""

    def shown(case: Case) -> dict[str, ndarray]:
        return judged.tensors(case, "float64") if judged.holds(case, "float64") else {}

    whole = [finding for finding in findings if finding.tap and finding.tap != "names"]
    return list(investigate_files(whole, judged.cases, shown, judged.producer))


def labelled(name: str, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Put the name of the model, if there are several, before that of the case."""
    for finding in findings:
        yield replace(finding, case=f"{name}/{finding.case}") if name else finding


def compare_folders(truth: Folder, judged: Folder) -> Iterator[Finding]:
    """Compare every tensor of one folder with that of the other.

    Args:
        truth: What is right, in float64; its float32 tensors are the baseline for float32.
        judged: What may be right too.

    Raises:
        ValueError: They are not about the same model and inputs, or the truth cannot judge such a folder.
    """
    if problems := format.differences(truth, judged):
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ValueError(f"{truth.path} and {judged.path} are not about the same: {shown}")
    for dtype in judged.dtypes:
        if needed := {"float64", dtype} - set(truth.dtypes):
            raise ValueError(
                f"{judged.path} holds {dtype}, which is judged by float64 and {dtype} tensors of the truth: "
                f"{truth.path} holds no {', '.join(sorted(needed))}"
            )
    for case in truth.cases:
        for dtype in DTYPES:
            yield from _compare_case(case, dtype, truth, judged)
    known = {case.name for case in truth.cases}
    for case in judged.cases:
        if case.name not in known:
            for dtype in case.dtypes:
                if why := truth.why_not(case, dtype):
                    yield _finding(judged, case, dtype, "", 0.0, 0.0, f"the truth leaves it out: {why}", SKIPPED)
                else:
                    yield _failed(judged, case, dtype, "there is no such case in the truth")


def _compare_case(case: Case, dtype: str, truth: Folder, judged: Folder) -> Iterator[Finding]:
    if not judged.holds(case, dtype):
        if truth.holds(case, dtype):
            if why := judged.why_not(case, dtype):
                yield _finding(judged, case, dtype, "", 0.0, 0.0, why, SKIPPED)
            elif dtype in judged.dtypes:
                yield _failed(judged, case, dtype, "the case is missing, and nothing says that it is left out")
        return
    lacking = [needed for needed in dict.fromkeys(("float64", dtype)) if not truth.holds(case, needed)]
    if lacking and case.stage == DECODE and truth.holds(case, "float64"):
        lacking = []  # tokens and scores are judged by running the reference
    if lacking:
        yield _failed(judged, case, dtype, f"the truth holds no {' and no '.join(lacking)} tensors to judge it by")
        return

    exact, actual = truth.tensors(case, "float64"), judged.tensors(case, dtype)
    usual = truth.tensors(case, dtype if truth.holds(case, dtype) else "float64")
    if unsound := [name for name in usual if name not in exact or exact[name].shape != usual[name].shape]:
        yield _failed(judged, case, dtype, f"the truth holds something else in float64: {unsound[0]}")
        return
    if unsound := [name for name in usual if not (np.isfinite(exact[name]).all() and np.isfinite(usual[name]).all())]:
        yield _failed(judged, case, dtype, f"the truth itself is not finite: {unsound[0]}")
        return
    left_out = {name: judged.why_not(case, dtype, name) for name in usual if name not in actual}
    unknown = {name: truth.why_not(case, dtype, name) for name in actual if name not in usual}
    reasons = [why for why in left_out.values() if why]
    reasons += [f"the truth leaves it out: {why}" for why in unknown.values() if why]
    for why in dict.fromkeys(reasons):
        yield _finding(judged, case, dtype, "", 0.0, 0.0, f"{reasons.count(why)} tensors: {why}", SKIPPED)
    due = [name for name in usual if not left_out.get(name)]
    have = [name for name in actual if not unknown.get(name)]
    if case.stage != ACTIVATIONS:  # where the order is nobody's business
        due, have = sorted(due), sorted(have)
    if have != due:
        yield _finding(judged, case, dtype, "names", math.inf, 0.0, name_problem(have, due))
    names = [name for name in usual if name in actual]
    if case.stage == DECODE:
        yield from _judge_decoding(case, dtype, truth, judged, actual, names)
    else:
        yield from _judge_tensors(case, dtype, judged, actual, exact, usual, names)


def _judge_tensors(
    case: Case, dtype: str, judged: Folder, actual: Tensors, exact: Tensors, usual: Tensors, names: Sequence[str]
) -> Iterator[Finding]:
    """PrefixScorer activations, gradients, or what optimizer steps have left, one after another."""
    problems = {
        name: structure_problem(actual[name], usual[name], dtype if usual[name].ndim else "float64") for name in names
    }
    parameters = [name for name in names if name.startswith("of ") and not problems[name]]
    if case.stage == GRADIENTS and parameters:
        actual, exact, usual = (_with_whole(tensors, parameters) for tensors in (actual, exact, usual))
        names = [outputs.WHOLE, *names]

    def distance(name: str, tensors: Tensors) -> float:
        if case.stage == ACTIVATIONS:
            return relative_error(tensors[name], exact[name])
        return outputs.training_error(name, tensors, exact)

    baseline = {name: 0.0 if dtype == "float64" else distance(name, usual) for name in names}
    for name in names:
        if case.stage == ACTIVATIONS:
            allowed = tolerance(name, dtype, baseline[name])
        else:
            allowed = outputs.training_tolerance(name, dtype, baseline[name], baseline.get(outputs.WHOLE, 0.0))
        problem = problems.get(name, "")
        error = math.inf if problem else distance(name, actual)
        yield _finding(judged, case, dtype, name, error, allowed, problem)


def _with_whole(tensors: Tensors, parameters: Sequence[str]) -> dict[str, ndarray]:
    """Add the gradients of all parameters, one after another."""
    return {**tensors, outputs.WHOLE: np.concatenate([np.ravel(tensors[name]) for name in sorted(parameters)])}


def _judge_decoding(
    case: Case, dtype: str, truth: Folder, judged: Folder, actual: Tensors, names: Sequence[str]
) -> Iterator[Finding]:
    """PrefixScorer the tokens that were found, where they differ by asking the reference; then their scores."""
    if case.search is None or TOKENS not in names:
        return  # and the names are a finding already
    ids, expected = actual[TOKENS], truth.tensors(case, "float64")[TOKENS]
    config, source_ids = truth.config, case.inputs["source_ids"]
    shape = (*expected.shape[:2], max(ids.shape[2:], default=0))
    problem = structure_problem(ids, np.broadcast_to(np.int64(0), shape), "int64")
    if not problem and not 0 < shape[2] <= case.search.limit(source_ids.shape[1], config):
        problem = f"hypotheses must be of 1 to {case.search.limit(source_ids.shape[1], config)} tokens: got {shape[2]}"
    if not problem and not ((ids >= 0) & (ids < config.target_vocab_size)).all():
        problem = f"tokens must be in 0 to {config.target_vocab_size - 1}: got {ids.min()} to {ids.max()}"
    if problem:
        yield _finding(judged, case, dtype, TOKENS, math.inf, 0.0, problem)
        return
    exact = Transformer.from_weights(config, truth.weights, "float64", "cpu")
    rounded = None if dtype == "float64" else Transformer.from_weights(config, truth.weights, dtype, "cpu")
    unknown = np.full(ids.shape[:2], np.nan)  # what was in the beam at each step is in no file
    doubts = explain(exact, rounded, source_ids, Decoded(SearchResult(ids, unknown), []), expected, case.search)
    worst = max(doubts, key=lambda doubt: (not doubt.is_near_tie, doubt.margin), default=None)
    margin, noise = (worst.margin, worst.noise) if worst else (0.0, 0.0)
    yield _finding(judged, case, dtype, TOKENS, margin, noise, summary(doubts), is_problem=margin == math.inf)
    if SCORES in names:
        known = score(exact, source_ids, ids, case.search)
        usual = None if rounded is None else score(rounded, source_ids, ids, case.search)
        if np.array_equal(ids, expected):
            known = truth.tensors(case, "float64")[SCORES]
        problem = structure_problem(actual[SCORES], known, dtype)
        error = math.inf if problem else relative_error(actual[SCORES], known)
        yield _finding(judged, case, dtype, SCORES, error, score_tolerance(known, usual), problem)


def _finding(
    judged: Folder,
    case: Case,
    dtype: str,
    tensor: str,
    error: float,
    allowed: float,
    detail: str = "",
    verdict: str = "",
    *,
    is_problem: bool | None = None,
) -> Finding:
    """Return a comparison, with its verdict unless that is given; a detail is a problem unless that is denied."""
    problem = bool(detail) if is_problem is None else is_problem
    found = AGREES if error <= allowed else DIVERGES if problem or dtype == "float64" else IMPRECISE
    place = (judged.producer, dtype, case.component, case.name, FILES, tensor)
    return Finding(*place, error, allowed, verdict or found, detail)


def _failed(judged: Folder, case: Case, dtype: str, why: str) -> Finding:
    return _finding(judged, case, dtype, "", math.inf, 0.0, why, FAILED)


def untested_dtypes(pairs: Mapping[str, tuple[Folder, Folder]]) -> list[str]:
    """Return the dtypes that the judged side does not hold."""
    held = {dtype for truth, _ in pairs.values() for dtype in truth.dtypes}
    judged = {dtype for _, folder in pairs.values() for dtype in folder.dtypes}
    return [f"{dtype} (B holds none)" for dtype in DTYPES if dtype in held - judged]
