"""One process per port: they do not disturb one another, and a crash of one is a finding about that one.

A process may be run by another interpreter, in an environment that has what the port needs: Python 3.11 or later, NumPy
2, ml-dtypes and safetensors, beside the port and its framework. This package need not be installed there.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformer_parity.engine.findings import Finding, Kept, failure
from transformer_parity.engine.processes.child import PATIENCE, Child, ChildEndedError, StartError
from transformer_parity.engine.processes.children import THREAD_SWITCHES, Children
from transformer_parity.engine.system.machine import processors
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.check.kept_programs import keep_programs
from transformer_parity.transformer.check.one_port import Job, Message, cases_of
from transformer_parity.transformer.compare.comparator import Comparator
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.diagnose.weight_audit import Fate
from transformer_parity.transformer.ports.compile_clock import Spent
from transformer_parity.transformer.ports.protocol import Placements


@dataclass
class Outcome:
    """What all processes found.

    Attributes:
        environment: Versions and switches, by name.
        findings: Every comparison.
        names: By which findings call a port, by what was asked for.
        cases: What each port was run on, by name.
        dtypes: Those that each port computes in, by name.
        audits: What became of the weights, by name.
        failure_reports: Where differences were introduced.
        spent: The time of each process, by name.
    """

    environment: dict[str, dict[str, str]]
    findings: list[Finding] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    cases: dict[str, Sequence[Case]] = field(default_factory=dict)
    dtypes: dict[str, Sequence[str]] = field(default_factory=dict)
    audits: dict[str, tuple[Fate, ...]] = field(default_factory=dict)
    failure_reports: list[FailureReport] = field(default_factory=list)
    spent: dict[str, Spent] = field(default_factory=dict)

    def name(self, job: Job) -> str:
        """Return what findings call a port."""
        return self.names.get(job.backend, job.title)

    def keep(self, message: Message, job: Job) -> None:
        """Keep a message; of two ports of the same name, the second is called as it was asked for."""
        if message.facts is not None:
            taken = {name for asked, name in self.names.items() if asked != job.backend}
            self.names[job.backend] = job.backend if message.facts.name in taken else message.facts.name
            self.cases[self.name(job)] = cases_of(job, message.facts)
            self.dtypes[self.name(job)] = message.facts.dtypes
        name = self.name(job)
        self.findings += [replace(finding, backend=name) for finding in message.findings]
        if message.audit:
            self.audits[name] = message.audit
        if message.failure_report is not None:
            self.failure_reports.append(message.failure_report.of(name))
        if message.environment:
            self.environment[name] = message.environment
        if message.spent:
            self.spent[name] = message.spent


WORK = "transformer_parity.transformer.check.one_port:work"  # what a process runs
SLOWEST_FIRST = ("jax", "tf", "torch", "numpy")  # to compile, on all cases
SILENCE = 600.0  # seconds, of a process' own, without a message, after which it is ended

# Of glibc, which by default gives memory back to Linux and asks for it again: an eighth of JAX's time for compiling.
# As ``system.environment.keep_freed_memory``, of processes that are yet to start.
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def run_all(
    jobs: Sequence[Job], *, interpreters: Mapping[str, str] | None = None, timeout: float | None = SILENCE
) -> Iterator[Message]:
    """Do all jobs, as many at a time as processors are allowed, and yield the messages of their processes.

    The outputs of the ports are compared here, where no port runs, and the findings added to the messages. Closing the
    iterator ends the processes.

    Args:
        jobs: What to compare, one job for each backend.
        interpreters: The Python interpreter that runs a backend, where it is not this one.
        timeout: Seconds of silence, without those of waiting for a processor, after which a process is ended; None
            waits for ever.
    """
    cores = processors()
    at_once = max(1, min(len(jobs), cores))
    threads = dict.fromkeys(THREAD_SWITCHES, str(max(1, cores // at_once)))
    waiting = sorted(jobs, key=_when)
    running: dict[Child, _Running] = {}
    reference = Reference(ports=sum(job.cases is not None for job in jobs) or 1)
    # Read by the frameworks when a process imports them.
    # The threads of small models mostly wait for one another: asleep, not by counting, which takes a processor each.
    defaults = {**threads, "OMP_WAIT_POLICY": "passive", **MEMORY, **keep_programs(os.environ)}
    with Children({**defaults, **os.environ}) as children:

        def begin() -> Iterator[Message]:
            """Start as many jobs as there is room for, and yield what cannot be started."""
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                try:
                    child = children.start(WORK, (interpreters or {}).get(job.backend, sys.executable))
                except StartError as error:
                    yield Message(job.backend, findings=(failure(job.title, str(error)),), done=True)
                else:
                    child.send(job)
                    running[child] = _Running(job, child, reference)

        yield from begin()
        for child, message in children.listen(running, patience=math.inf if timeout is None else timeout):
            found = running[child].received(message)
            yield found
            if found.done:
                del running[child]
                children.stop(child, PATIENCE)  # a framework may hang at exit
                yield from begin()


def _when(job: Job) -> int:
    return SLOWEST_FIRST.index(job.backend) if job.backend in SLOWEST_FIRST else -1


class _Running:
    """A job, its process, and what compares its outputs."""

    def __init__(self, job: Job, child: Child, reference: Reference) -> None:
        self.job, self.child, self.reference = job, child, reference
        self.name, self.doing = job.title, "starting"
        self.findings: list[Finding] = []
        self.kept: Kept = {}

    def received(self, message: Message | ChildEndedError) -> Message:
        """Return a message with its findings, or one that says that the process has ended."""
        if isinstance(message, ChildEndedError):
            problem = f"{message.how} at {self.doing}: {message.last_line}"
            return Message(self.job.backend, findings=(failure(self.name, problem),), done=True)
        self.doing = message.doing or self.doing
        if message.facts is not None:
            self.name = message.facts.name
            self.cases = {case.name: case for case in cases_of(self.job, message.facts)}
            # A port of the user's own is not told a precision, and is allowed none but the highest.
            own = message.facts.config is not None
            setting = Placements(self.job.setting.dtypes) if own else self.job.setting
            self.comparator = Comparator(self.name, setting, self.reference)
        found: list[Finding] = []
        if message.outputs is not None:
            case = self.cases[message.outputs.case]
            found = list(self.comparator.compare(case, message.outputs, self.kept))
        if message.problem:
            found.append(failure(self.name, message.problem))
        self.findings += found
        if message.ran:
            self.child.send((self.findings, self.kept))
        return replace(message, outputs=None, findings=tuple(found))
