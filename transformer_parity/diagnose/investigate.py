"""What happens when something fails: blame, diagnosis, and the guilty block's inputs on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.cases.case import ACTIVATIONS, GRADIENTS, STAGES, Case
from transformer_parity.compare.findings import Finding, Kept, Setting
from transformer_parity.compare.outputs import given
from transformer_parity.compare.tolerances import POLICY
from transformer_parity.compare.verdict import AGREES, DIVERGES, FAILED, IMPRECISE
from transformer_parity.diagnose import reproduce
from transformer_parity.diagnose.blame import INTRODUCED, Arrays, Blame, Evidence, blame, blame_files
from transformer_parity.diagnose.diagnosis import EXACT, LIKELY, UNKNOWN, Diagnosis, diagnose
from transformer_parity.diagnose.hypotheses import hypotheses
from transformer_parity.diagnose.signatures import growth, signatures
from transformer_parity.mistakes.mistake import Mistake
from transformer_parity.ports.protocol import Placement, Port
from transformer_parity.ports.registry import PORTS

MAPS = 6  # attention layers that are shown


@dataclass(frozen=True)
class FailureReport:
    """What came out of one failing case.

    Attributes:
        backend: The port.
        dtype: The working dtype.
        case: The name of the case.
        stage: What it compares.
        blame: Which block introduced the difference; None where nothing can be replayed.
        diagnosis: What the port does; None where nothing is wrong, and only its attention was asked for.
        attention: The weights of the first sentence, layer by layer (see ``attention_maps``).
        folder: Where the guilty block's inputs are; None if they were not saved.
    """

    backend: str
    dtype: str
    case: str
    stage: str
    blame: Blame | None
    diagnosis: Diagnosis | None
    attention: tuple[dict[str, Any], ...] = ()
    folder: Path | None = None

    def of(self, name: str) -> FailureReport:
        """Return the same with another name for the port."""
        blame = None if self.blame is None else replace(self.blame, backend=name)
        attention = tuple({**row, "backend": name} for row in self.attention)
        return replace(self, backend=name, blame=blame, attention=attention)


def investigate(
    findings: Sequence[Finding],
    kept: Kept,
    cases: Sequence[Case],
    port: Port,
    setting: Setting,
    reference: str,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
    suspect: Mistake | None = None,
) -> Iterator[FailureReport]:
    """Look into the first failure of each stage, of the whole model where there is one.

    Once activations differ, what follows from them is of no interest: gradients, steps and searches are looked into
    only where activations agree; precision only where float64 agrees.

    Args:
        findings: All of one port.
        kept: What it showed where it failed.
        cases: What was compared.
        port: The port.
        setting: How it was run.
        reference: By what the port can be loaded again: the name of a backend, or ``module:class``.
        folder: Where to save what a guilty block was given; None saves nothing.
        progress: Told what is going on.
        suspect: A hypothesis beside those that are known.
    """
    known = {case.name: case for case in cases}
    for finding in _first_failures(findings, known):
        if finding.verdict == FAILED:  # an exception says itself what it is
            continue
        case = known[finding.case]
        progress(f"looking into {finding.dtype} {case.name}")
        compared = {
            other.case for other in findings if other.verdict in (AGREES, DIVERGES) and other.dtype == "float64"
        }
        others = [
            (other, kept.get((name, "float64")))
            for name, other in known.items()
            if name in compared - {case.name} and _model(other) == _model(case)
        ]
        shown = kept.get((case.name, finding.dtype), {})
        yield _look_into(case, finding, shown, port, setting, reference, folder, progress, suspect, others)


def investigate_files(
    findings: Sequence[Finding], cases: Sequence[Case], shown: Callable[[Case], Arrays], backend: str
) -> Iterator[FailureReport]:
    """Look likewise into tensors that somebody wrote down, in float64; ``shown`` returns those of a case."""
    known = {case.name: case for case in cases}
    for finding in _first_failures(findings, known):
        case = known[finding.case]
        actual = shown(case) if finding.dtype == "float64" else {}
        if not actual:
            continue
        evidence = None
        if case.stage in (ACTIVATIONS, GRADIENTS):
            truth = PORTS["numpy"].load(case.config, case.load_weights(), Placement("float64"))
            evidence = blame_files(case, actual, truth, backend)
        same_model = [other for other in cases if other.name != case.name and _model(other) == _model(case)]
        others = [(other, tensors) for other in same_model if (tensors := shown(other))]
        found = diagnose(case, actual, backend, others=others)
        if evidence is not None:
            found = _with_signatures(found, evidence, case, case.load_weights(), "float64")
        marks = evidence.blame if evidence is not None else None
        yield FailureReport(backend, "float64", case.name, case.stage, marks, found)


def _model(case: Case) -> tuple[object, ...]:
    """Return what two cases have in common if one hypothesis has to hold in both."""
    return case.config, case.seed, case.weights_file, case.block, case.stage


def _first_failures(findings: Sequence[Finding], cases: Mapping[str, Case]) -> list[Finding]:
    failures = [f for f in findings if f.verdict in (DIVERGES, IMPRECISE, FAILED) and f.case in cases]
    for dtype in ("float64", "float32"):
        for stages in ((ACTIVATIONS,), tuple(stage for stage in STAGES if stage != ACTIVATIONS)):
            chosen = []
            for stage in stages:
                of_stage = [f for f in failures if f.dtype == dtype and cases[f.case].stage == stage]
                # Where all of the model is run, blame can tell its blocks apart.
                of_stage.sort(key=lambda f: (f.verdict == FAILED, cases[f.case].block != ""))
                chosen += of_stage[:1]
            if chosen:
                return chosen if stages != (ACTIVATIONS,) or dtype == "float32" else chosen[:1]
    return []


def _look_into(
    case: Case,
    finding: Finding,
    shown: Mapping[str, ndarray],
    port: Port,
    setting: Setting,
    reference: str,
    folder: Path | None,
    progress: Callable[[str], None],
    suspect: Mistake | None,
    others: Sequence[tuple[Case, Arrays | None]],
) -> FailureReport:
    dtype, weights = finding.dtype, given(case.load_weights(), finding.dtype)
    unknown = Diagnosis(f"unknown: {finding.detail}" if finding.detail else "unknown", UNKNOWN)
    failure_report = FailureReport(port.name, dtype, case.name, case.stage, None, unknown)
    if finding.path == "fast" and case.stage == ACTIVATIONS:
        sentence = "the taps agree, and the path without taps does not: look at the fused attention, and at compilation"
        return replace(failure_report, diagnosis=Diagnosis(sentence, LIKELY))
    if not shown:
        return failure_report
    evidence = _blame(case, port, setting, dtype) if case.stage in (ACTIVATIONS, GRADIENTS) else None
    found = unknown
    if dtype == "float64":
        known = [*hypotheses(case.config, case.stage), *([suspect] if suspect else [])]
        found = diagnose(case, shown, port.name, progress, known, others)
    if evidence is not None:
        found = _with_signatures(found, evidence, case, weights, dtype)
    saved = None
    if folder is not None and evidence is not None and evidence.blame.introduced:
        progress("saving the guilty block's inputs")
        with suppress(Exception):  # where it cannot be saved, what was found is still to be told
            saved = reproduce.save(evidence, case, given(case.inputs, dtype), weights, reference, folder)
    if evidence is None:
        return replace(failure_report, diagnosis=found)
    maps = attention_maps(evidence) if case.stage == ACTIVATIONS else ()
    return replace(failure_report, blame=evidence.blame, diagnosis=found, attention=maps, folder=saved)


def _with_signatures(
    found: Diagnosis, evidence: Evidence, case: Case, weights: Mapping[str, ndarray], dtype: str
) -> Diagnosis:
    """Add what the error of the first guilty block looks like; that is the diagnosis where no hypothesis fits."""
    guilty = evidence.blame.introduced
    if not guilty:
        return found
    name = guilty[0]
    far = 1e-9 if dtype == "float64" else 1e-5
    looks = []
    if name in evidence.alone and name in evidence.wanted:
        looks = signatures(evidence.alone[name], evidence.wanted[name], case.config, weights, far)
    if case.stage == ACTIVATIONS:
        depth = [(mark.name, mark.free) for mark in evidence.blame.marks]
        words = growth(depth, POLICY["float64"]["tap"])
        looks += [words] if words and f"at {name}," not in words and found.confidence != EXACT else []
    if found.confidence == EXACT or not looks:
        return replace(found, signatures=tuple(looks))
    sentence = f"no known mistake fits; at {name}, {looks[0]}"
    if dtype == "float32":
        sentence = f"at {name}, {looks[0]}: if float64 agrees, only precision is lost"
    return replace(found, sentence=sentence, confidence=LIKELY, signatures=tuple(looks))


def attention_maps(evidence: Evidence, limit: int = MAPS) -> tuple[dict[str, Any], ...]:
    """Return the attention weights [H, L, M] of the first sentence, of the reference and of the port.

    If there are more layers than ``limit``, those in which a difference was introduced come first. Rounded to six
    decimals: a picture shows no more.
    """
    marked = [mark for mark in evidence.blame.marks if mark.name.endswith(".weights") and mark.name in evidence.actual]
    marked = [mark for mark in marked if evidence.actual[mark.name].ndim == 4]
    guilty = {name.rpartition(".")[0] for name in evidence.blame.introduced}
    chosen = sorted(marked, key=lambda mark: mark.name.rpartition(".")[0] not in guilty)[:limit]
    return tuple(
        {
            "backend": evidence.blame.backend,
            "dtype": evidence.blame.dtype,
            "case": evidence.blame.case,
            "tap": mark.name,
            "introduced": mark.verdict == INTRODUCED,
            "expected": np.asarray(evidence.expected[mark.name][0], np.float64).round(6),
            "actual": np.asarray(evidence.actual[mark.name][0], np.float64).round(6),
        }
        for mark in marked
        if mark in chosen
    )


def look(case: Case, port: Port, setting: Setting) -> FailureReport:
    """Return the attention of a port that agrees, for the picture."""
    dtype = next(dtype for dtype in setting.dtypes if dtype in case.dtypes)
    evidence = _blame(case, port, setting, dtype)
    return FailureReport(port.name, dtype, case.name, case.stage, None, None, attention_maps(evidence))


def _blame(case: Case, port: Port, setting: Setting, dtype: str) -> Evidence:
    weights = given(case.load_weights(), dtype)
    load = PORTS["numpy"].load
    truth = load(case.config, weights, Placement("float64"))
    rounded = load(case.config, weights, Placement("float32")) if dtype == "float32" else None
    loaded = port.load(case.config, weights, setting.placement(dtype))
    return blame(case, given(case.inputs, dtype), loaded, truth, rounded, port.name, dtype)
