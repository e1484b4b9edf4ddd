"""Findings: the results of comparing one tensor."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from numpy import ndarray

AGREES, DIVERGES, IMPRECISE, FAILED = "agrees", "diverges", "imprecise", "failed"
SKIPPED = "skipped"  # not offered, and so not compared
ROUND_TRIP = "round trip"
FAR_BEYOND = 1e6  # tolerances


@dataclass(frozen=True)
class Finding:
    """One comparison: one tensor of one case, of one port in one dtype.

    Attributes:
        backend: The name of the port.
        dtype: The working dtype.
        component: The part of the model that the case is about.
        case: The name of the case.
        path: How the model was run (see ``outputs``), or ``run`` if it failed before that.
        tap: The name of the tensor.
        error: The relative error; infinite if there is a problem.
        tolerance: The largest error that agrees.
        verdict: One of those above; see ``verdict.decide``.
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

    @property
    def words(self) -> str:
        """What is wrong with it; far beyond the tolerance, how far does not matter."""
        if self.detail:
            return self.detail
        if self.share >= FAR_BEYOND:
            return f"error {self.error:.1e}, for a tolerance of {self.tolerance:.1e}"
        return f"error {self.error:.1e}, {self.share:.3g} times its tolerance of {self.tolerance:.1e}"

    @property
    def is_near_tie(self) -> bool:
        """Whether a discrete decision differs and agrees all the same, because rounding may turn it."""
        return self.verdict == AGREES and bool(self.detail)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**asdict(self), "share": self.share}


# By case and dtype: the tensors of a port, in the order of computation.
Kept = dict[tuple[str, str], dict[str, ndarray]]


def failure(backend: str, problem: str) -> Finding:
    """Return the finding that a port could not be compared at all, or not to the end."""
    return Finding(backend, "", "process", "", "run", "", math.inf, 0.0, FAILED, problem)
