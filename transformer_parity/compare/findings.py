"""Findings, verdicts and exit codes: what one comparison yields, and what all of them amount to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
from numpy import ndarray

from transformer_parity.compare.outputs import TOKENS
from transformer_parity.ports.protocol import Placement

AGREES, DIVERGES, IMPRECISE, FAILED = "agrees", "diverges", "imprecise", "failed"
SKIPPED = "skipped"  # the port does not offer it: counted, and never a pass


@dataclass(frozen=True)
class Finding:
    """One comparison: one tensor of one case, of one port in one dtype."""

    backend: str
    dtype: str
    component: str
    case: str
    path: (
        str  # taps: with taps on; fast: the way a user runs it; cached: position by position; load: weights in and out
    )
    tap: str
    error: float
    tolerance: float
    verdict: str
    detail: str = ""

    @property
    def share(self) -> float:
        """How much of the tolerance the error uses; above 1 it fails."""
        return self.error / self.tolerance if self.tolerance else (0.0 if self.error == 0.0 else math.inf)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**asdict(self), "share": self.share}


Kept = dict[tuple[str, str], dict[str, ndarray]]  # by case and dtype: what the port showed, in the order of computation


@dataclass(frozen=True)
class Setting:
    """How ports are run."""

    dtypes: Sequence[str] = ("float64", "float32", "bfloat16")
    device: str = "cpu"
    precision: str = "highest"

    def placement(self, dtype: str) -> Placement:
        """Return where a model in one of the dtypes runs."""
        return Placement(dtype, self.device, self.precision)


EXIT_CODES = {AGREES: 0, DIVERGES: 1, IMPRECISE: 2, FAILED: 3}
SEVERITY = (SKIPPED, AGREES, IMPRECISE, FAILED, DIVERGES)
WORDS = {SKIPPED: "skip", AGREES: "ok", IMPRECISE: "IMPRECISE", DIVERGES: "DIVERGES", FAILED: "FAILED"}


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if all agree, 1 for a semantic divergence, 2 for precision only, 3 if not everything was compared."""
    return EXIT_CODES[overall(findings)]


def overall(findings: Iterable[Finding]) -> str:
    """Return the worst verdict of any port; one of which nothing is compared, or everything skipped, has failed.

    A loss of precision is only precision where float64 was compared too: without it, any mistake looks like one.
    """
    by_port: dict[str, list[Finding]] = {}
    for finding in findings:
        by_port.setdefault(finding.backend, []).append(finding)
    return max((_of_port(of_port) for of_port in by_port.values()), key=SEVERITY.index, default=FAILED)


def _of_port(findings: Sequence[Finding]) -> str:
    verdict = max((finding.verdict for finding in findings), key=SEVERITY.index)
    if verdict == SKIPPED or (verdict == IMPRECISE and undecided(findings)):
        return FAILED
    return verdict


def undecided(findings: Iterable[Finding]) -> list[str]:
    """Return the backends that lost precision and were not compared in float64."""
    findings = list(findings)
    decided = {finding.backend for finding in findings if finding.dtype == "float64" and finding.verdict != SKIPPED}
    return sorted({finding.backend for finding in findings if finding.verdict == IMPRECISE} - decided)


def worst(findings: Iterable[Finding]) -> Finding:
    """Return the finding with the worst verdict, and among equals the one that uses most of its tolerance."""
    return max(findings, key=lambda finding: (SEVERITY.index(finding.verdict), finding.share))


def is_near_tie(finding: Finding) -> bool:
    """Whether a search decided differently where rounding may turn the decision."""
    return finding.verdict == AGREES and finding.tap == TOKENS and bool(finding.detail)


def failure(backend: str, problem: str) -> Finding:
    """Return the finding that a port could not be compared at all, or not to the end."""
    return Finding(backend, "", "process", "", "run", "", math.inf, 0.0, FAILED, problem)
