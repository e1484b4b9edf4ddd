"""Verdicts: when one tensor agrees, and when a whole run does.

``decide`` is the only place where an error becomes a verdict, and ``Verdict.of`` the only one where findings become the
word that a run ends with. docs/agreement.md says what AGREE promises.
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


def decide(error: float, tolerance: float, dtype: str, problem: str = "") -> str:
    """Return the verdict on one tensor.

    Args:
        error: The relative error; NaN never agrees.
        tolerance: The largest error that agrees.
        dtype: The working dtype: below float64, an error above the tolerance may be a loss of precision.
        problem: A problem that no tolerance excuses: a wrong name, shape or dtype, or a value that is not finite.

    Raises:
        ValueError: The tolerance is negative, infinite or NaN.
    """
    if not 0.0 <= tolerance < math.inf:
        raise ValueError(f"a tolerance must be finite and at least 0: got {tolerance}")
    if problem:
        return DIVERGES
    if error <= tolerance:
        return AGREES
    return DIVERGES if dtype == "float64" else IMPRECISE


@dataclass(frozen=True)
class Author:
    """Makes the findings of one case of one port in one dtype; every verdict comes from ``decide``.

    Attributes:
        backend: The port.
        dtype: The working dtype.
        case: The name of the case.
        component: The part of the model that the case is about.
        stage: The stage of the case.
    """

    backend: str
    dtype: str
    case: str
    component: str
    stage: str

    def compared(
        self, path: str, tap: str, error: float, tolerance: float, *, problem: str = "", detail: str = ""
    ) -> Finding:
        """Return the finding about one tensor."""
        error = math.inf if problem else error
        verdict = decide(error, tolerance, self.dtype, problem)
        return self._finding(path, tap, error, tolerance, verdict, problem or detail)

    def round_trip(self, problem: str) -> Finding:
        """Return the finding about the weights, which must survive a round trip bit by bit."""
        error = math.inf if problem else 0.0
        found = self._finding(LOAD, ROUND_TRIP, error, 0.0, decide(error, 0.0, "float64", problem), problem)
        return replace(found, component="weights")

    def failed(self, path: str, why: str) -> Finding:
        """Return the finding that a case could not be compared."""
        return self._finding(path, "", math.inf, 0.0, FAILED, why)

    def skipped(self, path: str, why: str) -> Finding:
        """Return the finding that something is not offered, and so not compared."""
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
    """The comparisons that a run must make of one port.

    Attributes:
        port: Its name.
        stages: The requested stages, by name or by default; each must be compared in at least one dtype.
        dtypes: The dtypes requested by name; each must be compared in at least one stage.
        pairs: Whether stages and dtypes were both named, so that each stage must be compared in each dtype.
        planned: The number of cases by stage and dtype.
        elsewhere: The other dtypes in which each stage has cases.
        unproven: The reasons why an agreement of this port would prove nothing.
    """

    port: str
    stages: Sequence[str]
    dtypes: Sequence[str] = ()
    pairs: bool = False
    planned: Mapping[tuple[str, str], int] = field(default_factory=dict)
    elsewhere: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unproven: Sequence[str] = ()

    def missing(self, findings: Iterable[Finding]) -> list[str]:
        """Return the requests that were not compared, or not so that it proves anything."""
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
        """Return why some stages in some dtypes were not compared; empty if they were."""
        planned = sum(n for (stage, dtype), n in self.planned.items() if stage in stages and dtype in dtypes)
        if not planned:
            return f"there is no such case{self._instead(stages)}"
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
        return f"{len(compared)} of {planned} cases compared, and half are needed{why}"

    def _instead(self, stages: set[str]) -> str:
        """Return how to compare the stages in the dtypes in which they have cases; empty if there are none."""
        ways = [(stage, dtypes) for stage, dtypes in self.elsewhere.items() if stage in stages and dtypes]
        return "".join(
            f"; {stage} are compared in {' and '.join(dtypes)}: leave out --dtype, or run "
            f"--stage {stage} --dtype {','.join(dtypes)} by itself"
            for stage, dtypes in ways
        )


@dataclass(frozen=True)
class Verdict:
    """The final verdict of a run.

    Attributes:
        verdict: ``AGREES``, ``DIVERGES``, ``IMPRECISE``, or ``FAILED`` where not everything was compared.
        missing: Every request that was not compared, with its port and the reason.
        undecided: The ports that lost precision and were not compared in float64: any mistake looks like that.
    """

    verdict: str
    missing: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    @classmethod
    def of(cls, findings: Iterable[Finding], asked: Iterable[Coverage] = ()) -> Verdict:
        """Return the worst verdict of any port; AGREES only if every request was compared."""
        findings, asked = list(findings), list(asked)
        by_port: dict[str, list[Finding]] = {entry.port: [] for entry in asked}
        for finding in findings:
            by_port.setdefault(finding.backend, []).append(finding)
        missing = [why for entry in asked for why in entry.missing(by_port[entry.port])]
        undecided = [name for name, own in by_port.items() if _is_undecided(own)]
        worst = max((_of_port(own) for own in by_port.values()), key=SEVERITY.index, default=FAILED)
        incomplete = (missing or undecided) and worst != DIVERGES
        return cls(FAILED if incomplete else worst, tuple(missing), tuple(undecided))

    @property
    def word(self) -> str:
        """AGREE, DIVERGE, IMPRECISE or INCOMPLETE."""
        return LAST_WORDS[self.verdict]

    @property
    def doubt(self) -> str:
        """A sentence about the ports that are undecided; empty if there are none."""
        names = ", ".join(self.undecided)
        return f"Whether {names} lost only precision is not known: compare in float64 too." if names else ""

    @property
    def exit_code(self) -> int:
        """0 if all agree, 1 for a semantic divergence, 2 for precision only, 3 if not everything was compared."""
        return EXIT_CODES[self.verdict]


def _of_port(findings: Sequence[Finding]) -> str:
    """Return the worst verdict; a port of which no number was compared has failed."""
    verdict = max((finding.verdict for finding in findings), key=SEVERITY.index, default=FAILED)
    compared = any(finding.is_numeric for finding in findings)
    return FAILED if verdict in (SKIPPED, AGREES, IMPRECISE) and not compared else verdict


def _is_undecided(findings: Sequence[Finding]) -> bool:
    imprecise = any(finding.verdict == IMPRECISE for finding in findings)
    return imprecise and not any(finding.dtype == "float64" and finding.is_numeric for finding in findings)


def worst(findings: Iterable[Finding]) -> Finding:
    """Return the finding with the worst verdict, and among equals the one that uses most of its tolerance."""
    return max(findings, key=lambda finding: (SEVERITY.index(finding.verdict), finding.share))
