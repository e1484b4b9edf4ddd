"""Create failure reports for tensors that were read from files, without running a port."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.findings import AGREES, SKIPPED, Finding
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.candidates.candidate import candidates
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, observed
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY, Diagnosis, diagnose
from transformer_parity.transformer.diagnose.evidence.blame import REPLAYED, blame_files
from transformer_parity.transformer.diagnose.evidence.differing import Differing
from transformer_parity.transformer.diagnose.evidence.properties import only_float32
from transformer_parity.transformer.diagnose.investigate import FailureReport, first_failures, forward_agrees, shared
from transformer_parity.transformer.diagnose.measured.step import first_step_in_words
from transformer_parity.transformer.diagnose.statements import (
    IN_FILES,
    if_it_is_meant,
    of_error,
    of_operand,
    of_place,
    of_rounding,
    of_tensors,
    with_first,
    within_stage,
)
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION


def investigate_files(
    findings: Sequence[Finding], cases: Sequence[Case], shown: Callable[[Case], Arrays], backend: str
) -> Iterator[FailureReport]:
    """Yield a report on the first float64 failure of each stage. ``shown`` returns the tensors of a case."""
    known = {case.name: case for case in cases}
    for finding in first_failures(findings, known):
        case = known[finding.case]
        actual = shown(case) if finding.dtype == "float64" else {}
        if not actual:
            continue
        alike = [other for other in cases if other.name != case.name and shared(other) == shared(case)]
        differ = {f.case for f in findings if f.dtype == "float64" and f.verdict not in (AGREES, SKIPPED)}
        compared = {f.case for f in findings if f.dtype == "float64" and f.verdict == AGREES} | differ
        tensors = [(other, shown(other)) for other in alike if other.name in compared]
        others = [(other, arrays if other.name in differ else None) for other, arrays in tensors if arrays]
        yield _report_on_files(case, [finding, *findings], actual, others, backend)


def _report_on_files(
    case: Case,
    findings: Sequence[Finding],
    actual: Arrays,
    others: Sequence[tuple[Case, Arrays | None]],
    backend: str,
) -> FailureReport:
    report = FailureReport(backend, "float64", case.name, case.stage, None, None)
    truth = observed(TRUTH, case) or {}
    if precision := only_float32(case, actual, truth):
        return replace(report, diagnosis=Diagnosis(precision, LIKELY))
    hypothetical = candidates(case.config, case.stage, forward_agrees=forward_agrees(findings))
    found = if_it_is_meant(diagnose(case, actual, backend, known=hypothetical, others=others), IN_FILES)
    of_stage = [f for f in findings if f.dtype == "float64" and f.stage == case.stage]
    differing = Differing.of(case, of_stage, actual, truth)
    if found.confidence != EXACT:
        found = of_tensors(found, differing, of_stage, others, lambda found: _with_rate(found, case, actual))
    if case.stage in REPLAYED:
        reference = DEFINITION.load(case.config, case.load_weights(), Placement("float64"))
        evidence = blame_files(case, actual, reference, backend)
        report = replace(report, blame=evidence.blame)
        if evidence.blame.introduced:
            errors = [*of_rounding(evidence, case), *of_operand(evidence, case), *of_error(evidence, case)]
            found = of_place(found, evidence, case, errors, differing, of_stage, others)
    return replace(report, diagnosis=within_stage(found, case))


def _with_rate(found: Diagnosis, case: Case, actual: Arrays) -> Diagnosis:
    """If the first training step is too large or too small by a constant factor, add this factor to the diagnosis."""
    rate = first_step_in_words(case, actual)
    return with_first(found, [rate]) if rate else found
