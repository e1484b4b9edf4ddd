"""One process per port: they do not disturb one another, and a crash of one is a finding about that one.

A process may be run by another interpreter, in an environment that has what the port needs: Python 3.11 or later, NumPy
2, ml-dtypes and safetensors, beside the port and its framework. This package need not be installed there.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformer_parity.engine.findings import Finding, Kept, failure
from transformer_parity.engine.processes.child import PATIENCE, Child, ChildEndedError, StartError
from transformer_parity.engine.processes.children import THREAD_SWITCHES, Children
from transformer_parity.engine.processes.messages import Broken
from transformer_parity.engine.system.machine import processors
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.check.kept_programs import keep_programs
from transformer_parity.transformer.check.messages import (
    AllCasesCompared,
    AllCasesRan,
    Assignment,
    CaseCompared,
    CaseRan,
    FailureExplained,
    NowDoing,
    PortFinished,
    PortImported,
    PortJob,
    WeightsAudited,
)
from transformer_parity.transformer.compare.comparator import Comparator
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.diagnose.weight_audit import Fate
from transformer_parity.transformer.ports.compile_clock import Spent
from transformer_parity.transformer.ports.protocol import Placements
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
        doing: What its process does.
        findings: Every comparison.
        audit: The fate of each weight.
        failure_reports: Where differences were introduced.
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
    """Call each port by its class or package; the second of the same name by what the user asked for."""
    for port in ports:
        port.label = _free_label(port, port.job.title, ports)


def _free_label(port: CheckedPort, name: str, ports: Sequence[CheckedPort]) -> str:
    return port.job.backend if any(other.label == name for other in ports if other is not port) else name


WORK = "transformer_parity.transformer.check.one_port:work"  # what a process runs
SLOWEST_FIRST = ("jax", "tf", "torch", "numpy")  # to compile, on all cases
SILENCE = 600.0  # seconds, of a process' own, without a message, after which it is ended

# Of glibc, which by default gives memory back to Linux and asks for it again: an eighth of JAX's time for compiling.
# As ``system.environment.keep_freed_memory``, of processes that are yet to start.
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def run_all(
    ports: Sequence[CheckedPort], *, interpreters: Mapping[str, str] | None = None, timeout: float | None = SILENCE
) -> Iterator[tuple[CheckedPort, Any]]:
    """Compare all ports, as many at a time as processors are allowed, and yield each message with its port.

    The outputs of the ports are compared here, where no port runs: a ``CaseCompared`` takes the place of a ``CaseRan``.
    Each port keeps what its messages say. Closing the iterator ends the processes.

    Args:
        ports: The ports to compare.
        interpreters: The Python interpreter that runs a backend, where it is not this one.
        timeout: Seconds of silence, without those of waiting for a processor, after which a process is ended; None
            waits for ever.
    """
    cores = processors()
    at_once = max(1, min(len(ports), cores))
    threads = dict.fromkeys(THREAD_SWITCHES, str(max(1, cores // at_once)))
    waiting = sorted(ports, key=lambda port: _when(port.job))
    running: dict[Child, _Comparing] = {}
    reference = Reference(ports=sum(port.given is not None for port in ports) or 1)
    give_labels(ports)
    # Read by the frameworks when a process imports them.
    # The threads of small models mostly wait for one another: asleep, not by counting, which takes a processor each.
    defaults = {**threads, "OMP_WAIT_POLICY": "passive", **MEMORY, **keep_programs(os.environ)}
    with Children({**defaults, **os.environ}) as children:

        def begin() -> Iterator[tuple[CheckedPort, CaseCompared]]:
            """Start as many processes as there is room for, and yield what cannot be started."""
            while waiting and len(running) < at_once:
                port = waiting.pop(0)
                try:
                    child = children.start(WORK, (interpreters or {}).get(port.job.backend, sys.executable))
                except StartError as error:
                    port.is_done = True
                    yield port, port.fail(str(error))
                else:
                    child.send(port.job)
                    running[child] = _Comparing(port, child, ports, reference)

        yield from begin()
        for child, message in children.listen(running, patience=math.inf if timeout is None else timeout):
            port = running[child].port
            yield port, running[child].received(message)
            if port.is_done:
                del running[child]
                children.stop(child, PATIENCE)  # a framework may hang at exit
                yield from begin()


def _when(job: PortJob) -> int:
    return SLOWEST_FIRST.index(job.backend) if job.backend in SLOWEST_FIRST else -1


class _Comparing:
    """The parent's side of one process: it assigns the cases and compares the outputs."""

    def __init__(self, port: CheckedPort, child: Child, ports: Sequence[CheckedPort], reference: Reference) -> None:
        self.port, self.child, self.ports, self.reference = port, child, ports, reference
        self.kept: Kept = {}

    def received(self, message: Any) -> Any:
        """Answer a message, and return it as the caller of ``run_all`` gets it."""
        port = self.port
        match message:
            case ChildEndedError():
                port.is_done = True
                return port.fail(f"{message.how} at {port.doing}: {message.last_line}")
            case Broken():
                return port.fail(message.why)
            case PortImported():
                self._assign(message)
            case CaseRan(outputs=outputs):
                message = CaseCompared([*self.comparator.compare(self.cases[outputs.case], outputs, self.kept)])
            case AllCasesRan():
                self.child.send(AllCasesCompared(port.findings, self.kept))
        port.keep(message)
        return message

    def _assign(self, imported: PortImported) -> None:
        """Decide what the port is called and run on, before it runs anything."""
        port = self.port
        port.label = _free_label(port, imported.name, self.ports)
        port.dtypes = imported.dtypes
        if port.given is not None:
            port.cases = port.given
        elif imported.config is not None:
            port.cases = port_cases(imported.config, port.stages)
        else:
            raise ValueError(f"{port.job.backend} has no cases, and no config to make them of")
        self.cases = {case.name: case for case in port.cases}
        # A user's port is not told a precision, and is allowed none but the highest.
        setting = port.job.setting if imported.config is None else Placements(port.job.setting.dtypes)
        self.comparator = Comparator(port.label, setting, self.reference)
        self.child.send(Assignment(port.label, port.cases))
