"""Findings, each of which is the result of comparing one tensor of a port with the reference."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from numpy import ndarray

AGREES, DIVERGES, IMPRECISE, FAILED = "agrees", "diverges", "imprecise", "failed"
SKIPPED = "skipped"  # not compared, because the implementation doesn't support it
ROUND_TRIP = "round trip"
FAR_BEYOND = 1e6  # ratio of error to tolerance above which the ratio isn't printed


@dataclass(frozen=True)
class Finding:
    """The result of comparing one tensor of a port with the reference, in one case and one dtype.

    Attributes:
        backend: The name of the port.
        dtype: The working dtype.
        component: The part of the model that the case tests.
        case: The name of the case.
        path: How the model was run (see ``outputs``), or ``run`` if a failure occurred before the model ran.
        tap: The name of the tensor.
        error: The relative error; infinite if the tensor has a problem, such as a wrong shape.
        tolerance: The largest accepted error.
        verdict: One of the verdicts above; see ``verdict.decide``.
        detail: A description of the problem or near-tie, or the reason why the tensor was not compared.
        stage: The stage of the case; empty for findings about the port as a whole.
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
    def ratio(self) -> float:
        """The error as a fraction of the tolerance. Values above 1 fail."""
        return self.error / self.tolerance if self.tolerance else (0.0 if self.error == 0.0 else math.inf)

    @property
    def is_numeric(self) -> bool:
        """Whether this finding compares values that a model computed.

        This excludes skipped comparisons and the round trip of the weights, which doesn't run the model.
        """
        return self.verdict != SKIPPED and bool(self.stage) and self.tap != ROUND_TRIP and math.isfinite(self.error)

    @property
    def words(self) -> str:
        """A description of the failure. If the error is much larger than the tolerance, the ratio is omitted."""
        if self.detail:
            return self.detail
        if self.ratio >= FAR_BEYOND:
            return f"error {self.error:.1e}, tolerance {self.tolerance:.1e}"
        return f"error {self.error:.1e}, {self.ratio:.3g} times the tolerance of {self.tolerance:.1e}"

    @property
    def is_near_tie(self) -> bool:
        """Whether a discrete result, such as a token, differs from the reference only because of rounding."""
        return self.verdict == AGREES and bool(self.detail)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as built-in Python types."""
        return {**asdict(self), "ratio": self.ratio}


# The tensors of a port, keyed by case and dtype. The tensors of each case are in the order of computation.
Kept = dict[tuple[str, str], dict[str, ndarray]]


def failure(backend: str, problem: str) -> Finding:
    """Return a finding for a port whose comparison failed or was interrupted."""
    return Finding(backend, "", "process", "", "run", "", math.inf, 0.0, FAILED, problem)
