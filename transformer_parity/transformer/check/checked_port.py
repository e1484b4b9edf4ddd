"""A port in a check, and everything that came of it. Reports are made from this."""

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
    """A port in a check, and everything that is known of it so far.

    Attributes:
        job: The port, and how it is run.
        given: The cases to run; None runs the cases that ``port_cases`` makes of the port's config.
        stages: The stages of these cases.
        label: Its name in findings and reports.
        cases: The cases that it is run on; empty until it has been imported.
        dtypes: The dtypes that it computes in; empty until it has been imported.
        doing: The current work of its process.
        findings: Every comparison.
        audit: The fate of each weight.
        failure_reports: The blocks that introduced differences, with explanations.
        environment: Versions and switches.
        spent: The time of its process.
        is_done: Whether its process has ended.
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
        """Keep the content of a message."""
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
        """Keep and return the finding that the port could not be compared, or not to the end."""
        failed = CaseCompared([failure(self.label, problem)])
        self.keep(failed)
        return failed


def give_labels(ports: Sequence[CheckedPort]) -> None:
    """Call each port by its class or package; if the name is taken, by the text that the user typed."""
    for port in ports:
        port.label = free_label(port, port.job.title, ports)


def free_label(port: CheckedPort, name: str, ports: Sequence[CheckedPort]) -> str:
    """Return the name of a port, or if a different port has it, the text that the user typed."""
    return port.job.backend if any(other.label == name for other in ports if other is not port) else name
