"""``parity compare``: whether two folders of golden vectors agree. No framework is needed, nor imported."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from rich.console import Console

from reference_numpy.search_plan import SearchResult
from reference_numpy.transformer import Transformer
from transformer_parity import observe, vectors
from transformer_parity.cases import ACTIVATIONS, DECODE, GRADIENTS, Case
from transformer_parity.commands.info import describe_machine
from transformer_parity.compare import (
    AGREES,
    DIVERGES,
    FAILED,
    IMPRECISE,
    SCORES,
    SKIPPED,
    TOKENS,
    Finding,
    name_problem,
    structure_problem,
)
from transformer_parity.decoding import Decoded, explain, score, score_budget, summary
from transformer_parity.inquiries import print_inquiry, to_row
from transformer_parity.investigate import Inquiry, investigate_files
from transformer_parity.policy import budget, relative_error
from transformer_parity.report import (
    EXIT_CODES,
    exit_code,
    is_near_tie,
    overall,
    print_near_ties,
    print_problems,
    print_summary,
    summarise,
    verdict_line,
)
from transformer_parity.result import plain, write_json
from transformer_parity.vectors import DTYPES, Folder

FILES = "files"  # the path of a finding: neither with taps on nor fast, but as somebody wrote it down
Tensors = Mapping[str, ndarray]

EXAMPLES = """
examples:
  parity golden --out truth
  parity compare truth mine                     mine: the same cases, computed by you; see docs/golden.md
  parity compare truth mine --json result.json

float64 is judged by the budgets of the policy; float32 by the error that the float32 tensors of A make themselves.
What B leaves out is skipped if its manifest says so, and a failure otherwise.

exit code: 0 agree, 1 semantic divergence, 2 precision only, 3 nothing or not everything compared
"""


def add_parser(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "compare",
        help="compare two folders that `parity golden`, or a port of yours, has written",
        description="Compare two folders of golden vectors, tensor by tensor. A is the truth, and B is judged.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("truth", type=Path, metavar="A", help="golden vectors that are right")
    parser.add_argument("judged", type=Path, metavar="B", help="golden vectors that may be")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result for machines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compare two folders and return the exit code."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    started = time.monotonic()
    findings: list[Finding] = []
    inquiries: list[Inquiry] = []
    try:
        if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
            raise ValueError(f"--json {options.json} is no file that could be written")
        pairs = _pairs(options.truth, options.judged)
        for name, (truth, judged) in pairs.items():
            of_model = list(compare_folders(truth, judged))
            findings += _labelled(name, of_model)
            inquiries += _investigate(of_model, judged)
    except (OSError, ValueError) as error:
        print(f"parity compare: error: {error}", file=sys.stderr)
        return EXIT_CODES[FAILED]
    seconds = time.monotonic() - started

    backends = list(dict.fromkeys(judged.producer for _, judged in pairs.values()))
    print_summary(console, findings, backends)
    print_near_ties(console, findings)
    _print_skipped(console, findings)
    print_problems(console, findings)
    for inquiry in inquiries:
        print_inquiry(console, inquiry)
    not_tested = _not_tested(pairs)
    for what in not_tested:
        console.print(f"NOT TESTED: {what}")
    console.print(verdict_line(findings, backends, seconds))
    code = exit_code(findings)
    if options.json is not None:
        result = _result(options, pairs, findings, not_tested)
        result["blames"] = [inquiry.blame.to_dict() for inquiry in inquiries if inquiry.blame]
        result["diagnoses"] = [to_row(inquiry) for inquiry in inquiries]
        write_json(options.json, plain(result))
    return code


def _pairs(truth: Path, judged: Path) -> dict[str, tuple[Folder, Folder]]:
    """Read both sides, one folder each or several of the same names."""
    ours, theirs = vectors.find(truth), vectors.find(judged)
    if ours.keys() != theirs.keys():
        held = [", ".join(filter(None, found)) or "golden vectors of one model" for found in (ours, theirs)]
        raise ValueError(f"both must hold the same models: {truth} holds {held[0]}, and {judged} holds {held[1]}")
    return {name: (vectors.read(ours[name]), vectors.read(theirs[name])) for name in ours}


def _investigate(findings: Sequence[Finding], judged: Folder) -> list[Inquiry]:
    """Blame and diagnose by the tensors that were written down, where there are enough of them."""

    def shown(case: Case) -> dict[str, ndarray]:
        return judged.tensors(case, "float64") if judged.holds(case, "float64") else {}

    whole = [finding for finding in findings if finding.tap and finding.tap != "names"]
    return list(investigate_files(whole, judged.cases, shown, judged.producer))


def _labelled(name: str, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Put the name of the model, if there are several, before that of the case."""
    for finding in findings:
        yield replace(finding, case=f"{name}/{finding.case}") if name else finding


def compare_folders(truth: Folder, judged: Folder) -> Iterator[Finding]:
    """Compare every tensor of one folder with that of the other.

    Args:
        truth: What is right, in float64; its float32 tensors are the yardstick for float32.
        judged: What may be right too.

    Raises:
        ValueError: They are not about the same model and inputs, or the truth cannot judge such a folder.
    """
    if problems := vectors.differences(truth, judged):
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
    if lacking and case.rung == DECODE and truth.holds(case, "float64"):
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
    if case.rung != ACTIVATIONS:  # where the order is nobody's business
        due, have = sorted(due), sorted(have)
    if have != due:
        yield _finding(judged, case, dtype, "names", math.inf, 0.0, name_problem(have, due))
    names = [name for name in usual if name in actual]
    if case.rung == DECODE:
        yield from _judge_decoding(case, dtype, truth, judged, actual, names)
    else:
        yield from _judge_tensors(case, dtype, judged, actual, exact, usual, names)


def _judge_tensors(
    case: Case, dtype: str, judged: Folder, actual: Tensors, exact: Tensors, usual: Tensors, names: Sequence[str]
) -> Iterator[Finding]:
    """Judge activations, gradients, or what optimizer steps have left, one after another."""
    problems = {
        name: structure_problem(actual[name], usual[name], dtype if usual[name].ndim else "float64") for name in names
    }
    parameters = [name for name in names if name.startswith("of ") and not problems[name]]
    if case.rung == GRADIENTS and parameters:
        actual, exact, usual = (_with_whole(tensors, parameters) for tensors in (actual, exact, usual))
        names = [observe.WHOLE, *names]

    def distance(name: str, tensors: Tensors) -> float:
        if case.rung == ACTIVATIONS:
            return relative_error(tensors[name], exact[name])
        return observe.error(name, tensors, exact)

    yardstick = {name: 0.0 if dtype == "float64" else distance(name, usual) for name in names}
    for name in names:
        if case.rung == ACTIVATIONS:
            allowed = budget(name, dtype, yardstick[name])
        else:
            allowed = observe.budget(name, dtype, yardstick[name], yardstick.get(observe.WHOLE, 0.0))
        problem = problems.get(name, "")
        error = math.inf if problem else distance(name, actual)
        yield _finding(judged, case, dtype, name, error, allowed, problem)


def _with_whole(tensors: Tensors, parameters: Sequence[str]) -> dict[str, ndarray]:
    """Add the gradients of all parameters, one after another."""
    return {**tensors, observe.WHOLE: np.concatenate([np.ravel(tensors[name]) for name in sorted(parameters)])}


def _judge_decoding(
    case: Case, dtype: str, truth: Folder, judged: Folder, actual: Tensors, names: Sequence[str]
) -> Iterator[Finding]:
    """Judge the tokens that were found, where they differ by asking the reference; then their scores."""
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
        yield _finding(judged, case, dtype, SCORES, error, score_budget(known, usual), problem)


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


def _print_skipped(console: Console, findings: Sequence[Finding]) -> None:
    """Print why something was not compared, and how often."""
    reasons = [f"{finding.dtype}: {finding.detail}" for finding in findings if finding.verdict == SKIPPED]
    for why in dict.fromkeys(reasons):
        console.print(f"SKIPPED   {why} ({reasons.count(why)} cases)" if reasons.count(why) > 1 else f"SKIPPED   {why}")


def _not_tested(pairs: Mapping[str, tuple[Folder, Folder]]) -> list[str]:
    """Return the dtypes that the judged side does not hold."""
    held = {dtype for truth, _ in pairs.values() for dtype in truth.dtypes}
    judged = {dtype for _, folder in pairs.values() for dtype in folder.dtypes}
    return [f"{dtype} (B holds none)" for dtype in DTYPES if dtype in held - judged]


def _result(
    options: argparse.Namespace,
    pairs: Mapping[str, tuple[Folder, Folder]],
    findings: Sequence[Finding],
    not_tested: Sequence[str],
) -> dict[str, Any]:
    """Return the result for machines."""
    return {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "exit_code": exit_code(findings),
        "verdict": overall(findings),
        "truth": {"path": str(options.truth), "producers": sorted({truth.producer for truth, _ in pairs.values()})},
        "judged": {"path": str(options.judged), "producers": sorted({judged.producer for _, judged in pairs.values()})},
        "not_tested": not_tested,
        "machine": describe_machine(),
        "comparisons": len(findings),
        "summary": summarise(findings),
        "near_ties": [finding.to_dict() for finding in findings if is_near_tie(finding)],
        "failures": [finding.to_dict() for finding in findings if finding.verdict != AGREES],
    }
