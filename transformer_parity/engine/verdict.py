"""Verdicts on individual tensors and on entire runs.

Only ``decide`` converts an error to a verdict, and only ``Verdict.of`` converts findings to the final verdict of a run.
docs/agreement.md describes what an ``AGREE`` verdict guarantees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from transformer_parity.engine.findings import (
    AGREES,
    DIVERGES,
    FAILED,
    IMPRECISE,
    ROUND_TRIP,
    SKIPPED,
    Finding,
)
from transformer_parity.engine.outputs import LOAD

EXIT_CODES = {AGREES: 0, DIVERGES: 1, IMPRECISE: 2, FAILED: 3}
SEVERITY = (SKIPPED, AGREES, IMPRECISE, FAILED, DIVERGES)
WORDS = {SKIPPED: "skip", AGREES: "ok", IMPRECISE: "IMPRECISE", DIVERGES: "DIVERGES", FAILED: "FAILED"}
LAST_WORDS = {AGREES: "AGREE", DIVERGES: "DIVERGE", IMPRECISE: "IMPRECISE", FAILED: "INCOMPLETE"}


def decide(error: float, tolerance: float, dtype: str, problem: str = "", is_rounding: bool | None = None) -> str:
    """Return the verdict on one tensor.

    Args:
        error: The relative error. If it is NaN, the verdict is never AGREES.
        tolerance: The largest accepted error.
        dtype: The working dtype. In float32 and bfloat16, an error over the tolerance may be caused by lost precision.
        problem: A problem that makes the tensor diverge regardless of the tolerance, such as an incorrect name, shape,
            or dtype, or a non-finite value. Empty if there is none.
        is_rounding: Whether an error over the tolerance is known to be a rounding error. None if this is unknown.

    Raises:
        ValueError: If the tolerance is negative, infinite, or NaN.
    """
    if not 0.0 <= tolerance < math.inf:
        raise ValueError(f"a tolerance must be finite and at least 0: got {tolerance}")
    if problem:
        return DIVERGES
    if error <= tolerance:
        return AGREES
    if is_rounding is None:
        is_rounding = dtype != "float64"
    return IMPRECISE if is_rounding else DIVERGES


@dataclass(frozen=True)
class Author:
    """Creates the findings for one port in one case and dtype. ``decide`` determines their verdicts.

    Attributes:
        backend: The port.
        dtype: The working dtype.
        case: The name of the case.
        component: The part of the model that the case tests.
        stage: The stage of the case.
    """

    backend: str
    dtype: str
    case: str
    component: str
    stage: str

    def compared(
        self,
        path: str,
        tap: str,
        error: float,
        tolerance: float,
        *,
        problem: str = "",
        detail: str = "",
        is_rounding: bool | None = None,
    ) -> Finding:
        """Return the finding about one tensor."""
        error = math.inf if problem else error
        verdict = decide(error, tolerance, self.dtype, problem, is_rounding)
        return self._finding(path, tap, error, tolerance, verdict, problem or detail)

    def round_trip(self, problem: str) -> Finding:
        """Return the finding about the exported weights, which must be bitwise identical to the loaded weights."""
        error = math.inf if problem else 0.0
        found = self._finding(LOAD, ROUND_TRIP, error, 0.0, decide(error, 0.0, "float64", problem), problem)
        return replace(found, component="weights")

    def failed(self, path: str, why: str) -> Finding:
        """Return a finding for a case that could not be compared."""
        return self._finding(path, "", math.inf, 0.0, FAILED, why)

    def skipped(self, path: str, why: str) -> Finding:
        """Return a finding for a comparison that was skipped because the port doesn't support it."""
        return self._finding(path, "", 0.0, 0.0, SKIPPED, why)

    def _finding(self, path: str, tap: str, error: float, tolerance: float, verdict: str, why: str) -> Finding:
        return Finding(
            backend=self.backend,
            dtype=self.dtype,
            component=self.component,
            case=self.case,
            path=path,
            tap=tap,
            error=error,
            tolerance=tolerance,
            verdict=verdict,
            detail=why,
            stage=self.stage,
        )


@dataclass(frozen=True)
class Coverage:
    """The comparisons that a run must make for one port.

    Attributes:
        port: The name of the port.
        stages: The stages requested explicitly or by default. Each stage must be compared in at least one dtype.
        dtypes: The dtypes requested explicitly. In each dtype, at least one stage must be compared.
        pairs: Whether stages and dtypes were both requested explicitly. Each stage must then be compared in each dtype.
        planned: The number of cases, keyed by stage and dtype.
        elsewhere: The dtypes that were not requested but in which a stage has cases, keyed by stage.
        unproven: The reasons why this port's agreement with the reference would be meaningless.
        tells_rounding: Whether errors in float32 were tested for being rounding errors. If so, a bug can be
            distinguished from lost precision without float64.
    """

    port: str
    stages: Sequence[str]
    dtypes: Sequence[str] = ()
    pairs: bool = False
    planned: Mapping[tuple[str, str], int] = field(default_factory=dict)
    elsewhere: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unproven: Sequence[str] = ()
    tells_rounding: bool = False

    def missing(self, findings: Iterable[Finding]) -> list[str]:
        """Describe each requested stage or dtype for which too few cases were compared.

        The result also includes the reasons in the attribute ``unproven``.
        """
        own = [finding for finding in findings if finding.backend == self.port]
        if self.pairs:
            wanted = [(f"{stage} in {dtype}", {stage}, {dtype}) for stage, dtype in product(self.stages, self.dtypes)]
        else:
            every = {dtype for _, dtype in self.planned}
            wanted = [(stage, {stage}, every) for stage in self.stages]
            wanted += [(dtype, set(self.stages), {dtype}) for dtype in self.dtypes]
        missing = [
            f"{self.port}: {what}: {why}" for what, stages, dtypes in wanted if (why := self._why(own, stages, dtypes))
        ]
        return missing + [f"{self.port}: {why}" for why in self.unproven]

    def _why(self, findings: Sequence[Finding], stages: set[str], dtypes: set[str]) -> str:
        """If too few cases of the given stages and dtypes were compared, return the reason.

        If enough cases were compared, return an empty string.
        """
        planned = sum(n for (stage, dtype), n in self.planned.items() if stage in stages and dtype in dtypes)
        if not planned:
            return f"no such cases exist{self._instead(stages)}"
        inside = [finding for finding in findings if finding.stage in stages and finding.dtype in dtypes]
        compared = {(finding.case, finding.dtype) for finding in inside if finding.is_numeric}
        if 2 * len(compared) >= planned:
            return ""
        open_ = [finding for finding in inside if finding.verdict in (SKIPPED, FAILED)]
        reasons = dict.fromkeys(one.detail for one in open_ if (one.case, one.dtype) not in compared)
        reasons = reasons or dict.fromkeys(one.detail for one in open_)
        why = f" ({'; '.join(list(reasons)[:2])})" if reasons else ""
        if not compared:
            return f"nothing was compared{why}"
        return f"only {len(compared)} of {planned} cases were compared, but at least half are required{why}"

    def _instead(self, stages: set[str]) -> str:
        """Return a hint on how to compare the stages in other dtypes.

        If no other dtype has such cases, return an empty string.
        """
        ways = [(stage, dtypes) for stage, dtypes in self.elsewhere.items() if stage in stages and dtypes]
        return "".join(
            f"; the {stage} stage is compared only in {' and '.join(dtypes)}; remove --dtype, or run "
            f"--stage {stage} --dtype {','.join(dtypes)} separately"
            for stage, dtypes in ways
        )


@dataclass(frozen=True)
class Verdict:
    """The final verdict of a run.

    Attributes:
        verdict: ``AGREES``, ``DIVERGES``, ``IMPRECISE``, or ``FAILED`` if not everything was compared.
        missing: Every requested comparison that was not made, with its port and the reason.
        undecided: The ports with large float32 errors that were not compared in float64. Without float64, a bug can't
            be distinguished from lost precision.
    """

    verdict: str
    missing: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    @classmethod
    def of(cls, findings: Iterable[Finding], asked: Iterable[Coverage] = ()) -> Verdict:
        """Return the worst of the ports' verdicts.

        If no port diverges, but a requested comparison is missing or a port is undecided, the verdict is FAILED.
        """
        findings, asked = list(findings), list(asked)
        by_port: dict[str, list[Finding]] = {entry.port: [] for entry in asked}
        for finding in findings:
            by_port.setdefault(finding.backend, []).append(finding)
        missing = [why for entry in asked for why in entry.missing(by_port[entry.port])]
        decided = {entry.port for entry in asked if entry.tells_rounding}
        undecided = [name for name, own in by_port.items() if name not in decided and _is_undecided(own)]
        worst = max((_of_port(own) for own in by_port.values()), key=SEVERITY.index, default=FAILED)
        incomplete = (missing or undecided) and worst != DIVERGES
        return cls(FAILED if incomplete else worst, tuple(missing), tuple(undecided))

    @property
    def word(self) -> str:
        """AGREE, DIVERGE, IMPRECISE, or INCOMPLETE."""
        return LAST_WORDS[self.verdict]

    @property
    def doubt(self) -> str:
        """A sentence about the undecided ports; empty if no port is undecided."""
        names = ", ".join(self.undecided)
        if not names:
            return ""
        return f"{names} may have a bug or may only lose precision. To find out, also compare in float64."

    @property
    def exit_code(self) -> int:
        """The exit code of the program.

        It is 0 if all ports agree with the reference, 1 if a port's math differs from it, 2 if only precision is lost,
        and 3 if not everything was compared.
        """
        return EXIT_CODES[self.verdict]


def _of_port(findings: Sequence[Finding]) -> str:
    """Return the worst verdict on a port. If no computed values were compared, the port has failed."""
    verdict = max((finding.verdict for finding in findings), key=SEVERITY.index, default=FAILED)
    compared = any(finding.is_numeric for finding in findings)
    return FAILED if verdict in (SKIPPED, AGREES, IMPRECISE) and not compared else verdict


def _is_undecided(findings: Sequence[Finding]) -> bool:
    imprecise = any(finding.verdict == IMPRECISE for finding in findings)
    return imprecise and not any(finding.dtype == "float64" and finding.is_numeric for finding in findings)


def worst(findings: Iterable[Finding]) -> Finding:
    """Return the finding with the worst verdict.

    If several findings have this verdict, return the one with the largest ratio of error to tolerance.
    """
    return max(findings, key=lambda finding: (SEVERITY.index(finding.verdict), finding.ratio))
