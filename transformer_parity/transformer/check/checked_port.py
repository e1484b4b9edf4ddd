"""The state of a port during a check, including all results, from which reports are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformer_parity.engine.findings import Finding, failure
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.check.messages import (
    CaseCompared,
    FailureExplained,
    NowDoing,
    PortFinished,
    PortJob,
    WeightsAudited,
)
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.diagnose.weight_audit import Fate
from transformer_parity.transformer.ports.compile_clock import Spent
from transformer_parity.transformer.stages.registry import STAGES


@dataclass
class CheckedPort:
    """A port that is being checked, and the results of this port so far.

    Attributes:
        job: The port, and the settings with which it runs.
        given: Cases to run; if None, the cases that ``port_cases`` creates from the port's config.
        stages: Stages of the cases that ``port_cases`` creates.
        label: Name of the port in findings and reports.
        cases: Cases that the port runs; empty before the port is imported.
        dtypes: Dtypes that the port supports; empty before the port is imported.
        doing: Current task of the port's process.
        findings: Findings from all comparisons so far.
        audit: Result of the weight audit for each weight.
        failure_reports: Reports on failing cases. A report names the block that introduced a difference, and explains
            the difference.
        environment: Package versions and settings in the port's process.
        spent: Wall-clock and CPU time of the port's process; None until the process finishes.
        is_done: True if the process has ended.
    """

    job: PortJob
    given: Sequence[Case] | None = None
    stages: Sequence[str] = tuple(STAGES)
    label: str = ""
    cases: Sequence[Case] = ()
    dtypes: Sequence[str] = ()
    doing: str = "starting"
    findings: list[Finding] = field(default_factory=list)
    audit: tuple[Fate, ...] = ()
    failure_reports: list[FailureReport] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    spent: Spent | None = None
    is_done: bool = False

    def keep(self, message: object) -> None:
        """Store the content of a message."""
        match message:
            case NowDoing():
                self.doing = message.text
            case CaseCompared():
                self.findings += message.findings
            case WeightsAudited():
                self.audit = message.fates
            case FailureExplained():
                self.failure_reports.append(message.report)
            case PortFinished():
                self.environment, self.spent, self.is_done = message.environment, message.spent, True

    def fail(self, problem: str) -> CaseCompared:
        """Record that the comparison failed or ended early, and return the finding."""
        failed = CaseCompared([failure(self.label, problem)])
        self.keep(failed)
        return failed


def give_labels(ports: Sequence[CheckedPort]) -> None:
    """Label each port with its class or package name. If a label is already used, use the text that the user typed."""
    for port in ports:
        port.label = free_label(port, port.job.title, ports)


def free_label(port: CheckedPort, name: str, ports: Sequence[CheckedPort]) -> str:
    """Return ``name``, or the text that the user typed if a different port already uses ``name``."""
    return port.job.backend if any(other.label == name for other in ports if other is not port) else name
