"""Findings: what one comparison of one tensor yields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from numpy import ndarray

from transformer_parity.cases.case import ALL_DTYPES, Case
from transformer_parity.compare.outputs import LOAD, TOKENS
from transformer_parity.compare.verdict import AGREES, FAILED, SKIPPED, decide
from transformer_parity.ports.protocol import Placement

ROUND_TRIP = "round trip"


@dataclass(frozen=True)
class Finding:
    """One comparison: one tensor of one case, of one port in one dtype.

    Attributes:
        backend: The name of the port.
        dtype: The working dtype.
        component: The part of the model that the case is about.
        case: The name of the case.
        path: How the model was run, one of ``outputs.PATHS``, or ``run`` where it did not get so far.
        tap: The name of the tensor.
        error: The relative error; infinite where there is a problem.
        tolerance: The largest error that agrees.
        verdict: See ``verdict.decide``.
        detail: The problem, the near-tie, or why nothing was compared.
        stage: The stage of the case; empty where the port as a whole is meant.
    """

    backend: str
    dtype: str
    component: str
    case: str
    path: str
    tap: str
    error: float
    tolerance: float
    verdict: str
    detail: str = ""
    stage: str = ""

    @property
    def share(self) -> float:
        """How much of the tolerance the error uses; above 1 it fails."""
        return self.error / self.tolerance if self.tolerance else (0.0 if self.error == 0.0 else math.inf)

    @property
    def is_numeric(self) -> bool:
        """Whether numbers of a case were compared: the round trip of the weights runs no model, and a skip nothing."""
        return self.verdict != SKIPPED and bool(self.stage) and self.tap != ROUND_TRIP and math.isfinite(self.error)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**asdict(self), "share": self.share}


@dataclass(frozen=True)
class Author:
    """Makes the findings of one case of one port in one dtype; every verdict comes from ``verdict.decide``."""

    backend: str
    dtype: str
    case: Case

    def compared(
        self, path: str, tap: str, error: float, tolerance: float, *, problem: str = "", detail: str = ""
    ) -> Finding:
        """Return the finding about one tensor."""
        error = math.inf if problem else error
        verdict = decide(error, tolerance, self.dtype, problem)
        return self._finding((self.case.component, path, tap), error, tolerance, verdict, problem or detail)

    def round_trip(self, problem: str) -> Finding:
        """Return the finding about the weights, which must come back bit by bit."""
        error = math.inf if problem else 0.0
        verdict = decide(error, 0.0, "float64", problem)
        return self._finding(("weights", LOAD, ROUND_TRIP), error, 0.0, verdict, problem)

    def failed(self, path: str, why: str) -> Finding:
        """Return the finding that a case could not be compared."""
        return self._finding((self.case.component, path, ""), math.inf, 0.0, FAILED, why)

    def skipped(self, path: str, why: str) -> Finding:
        """Return the finding that something is not offered, and so not compared."""
        return self._finding((self.case.component, path, ""), 0.0, 0.0, SKIPPED, why)

    def _finding(self, place: tuple[str, str, str], error: float, tolerance: float, verdict: str, why: str) -> Finding:
        component, path, tap = place
        where = (self.backend, self.dtype, component, self.case.name, path, tap)
        return Finding(*where, error, tolerance, verdict, why, self.case.stage)


Kept = dict[
    tuple[str, str], dict[str, ndarray]
]  # by case and dtype: the tensors of a port, in the order of computation


@dataclass(frozen=True)
class Setting:
    """How ports are run."""

    dtypes: Sequence[str] = ALL_DTYPES
    device: str = "cpu"
    precision: str = "highest"

    def placement(self, dtype: str) -> Placement:
        """Return where a model in one of the dtypes runs."""
        return Placement(dtype, self.device, self.precision)


def failure(backend: str, problem: str) -> Finding:
    """Return the finding that a port could not be compared at all, or not to the end."""
    return Finding(backend, "", "process", "", "run", "", math.inf, 0.0, FAILED, problem)


def is_near_tie(finding: Finding) -> bool:
    """Whether a search decided differently where rounding may turn the decision."""
    return finding.verdict == AGREES and finding.tap == TOKENS and bool(finding.detail)
