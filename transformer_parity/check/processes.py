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

from transformer_parity.check.one_port import Job, Message, title
from transformer_parity.compare.findings import Finding, failure
from transformer_parity.diagnose.investigate import FailureReport
from transformer_parity.diagnose.weight_audit import Fate
from transformer_parity.ports.compile_clock import Spent
from transformer_parity.system.child import PATIENCE, THREAD_SWITCHES, Child, ChildEndedError, Children


@dataclass
class Outcome:
    """What all processes found."""

    environment: dict[str, dict[str, str]]
    findings: list[Finding] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # by which findings call what was asked for
    audits: dict[str, tuple[Fate, ...]] = field(default_factory=dict)
    failure_reports: list[FailureReport] = field(default_factory=list)
    spent: dict[str, Spent] = field(default_factory=dict)


def keep(message: Message, outcome: Outcome) -> None:
    """Keep a message; of two ports of the same name, the second is called as it was asked for."""
    if message.name:
        taken = {name for asked, name in outcome.names.items() if asked != message.backend}
        outcome.names[message.backend] = message.backend if message.name in taken else message.name
    name = outcome.names.get(message.backend, message.backend.rpartition(":")[2])
    outcome.findings += [replace(finding, backend=name) for finding in message.findings]
    if message.audit:
        outcome.audits[name] = message.audit
    if message.failure_report is not None:
        outcome.failure_reports.append(message.failure_report.of(name))
    if message.environment:
        outcome.environment[name] = message.environment
    if message.spent:
        outcome.spent[name] = message.spent


WORK = "transformer_parity.check.one_port:work"  # what a process runs
SLOWEST_FIRST = ("jax", "tf", "torch", "numpy")  # to compile, on all cases
SILENCE = 600.0  # seconds, of a process' own, without a message, after which it is ended
LONGEST_INTERVAL = 5.0  # seconds between two looks at the processor time: a busy machine gives every process some


def run_all(
    jobs: Sequence[Job], *, interpreters: Mapping[str, str] | None = None, timeout: float | None = SILENCE
) -> Iterator[Message]:
    """Do all jobs, as many at a time as there are cores, and yield the messages of their processes.

    Closing the iterator ends the processes.

    Args:
        jobs: What to compare, one job for each backend.
        interpreters: The Python interpreter that runs a backend, where it is not this one.
        timeout: Seconds of silence, without those of waiting for a processor, after which a process is ended; None
            waits for ever.
    """
    cores = os.cpu_count() or 1
    at_once = max(1, min(len(jobs), cores))
    threads = dict.fromkeys(THREAD_SWITCHES, str(max(1, cores // at_once)))
    patience = math.inf if timeout is None else timeout
    interval = min(patience / 10.0, LONGEST_INTERVAL)
    waiting = sorted(jobs, key=_when)
    running: list[_Running] = []
    with Children({**threads, **os.environ}) as children:  # read by the frameworks when a process imports them
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                python = (interpreters or {}).get(job.backend, sys.executable)
                try:
                    running.append(_Running(job, children.start(WORK, python)))
                except OSError as error:
                    problem = f"the interpreter {python} cannot be started: {error.strerror}"
                    yield Message(job.backend, (failure(title(job.backend), problem),), done=True)
            news = children.wait([one.child for one in running], interval)
            for one in list(running):
                message = one.receive() if one.child in news else one.silent(patience, interval)
                if message is not None:
                    yield message
                    if message.done:
                        running.remove(one)
                        # A framework may hang at exit; a process that is silent, or has ended, is not waited for.
                        children.stop(one.child, PATIENCE if one.is_done else 0.0)


def _when(job: Job) -> int:
    return SLOWEST_FIRST.index(job.backend) if job.backend in SLOWEST_FIRST else -1


class _Running:
    """A job and its process."""

    def __init__(self, job: Job, child: Child) -> None:
        self.job, self.child = job, child
        self.name, self.doing = title(job.backend), "starting"
        self.is_done = False
        child.send(job)

    def receive(self) -> Message:
        """Return the next message, or one that says that the process has ended."""
        try:
            message: Message = self.child.receive()
        except ChildEndedError as error:
            return self._last(error.how, error.last_line)
        self.doing, self.name, self.is_done = message.doing or self.doing, message.name or self.name, message.done
        return message

    def silent(self, patience: float, interval: float) -> Message | None:
        """Return a message that says so if the process has been silent for too long."""
        if self.child.silence.count(interval) < patience:
            return None
        return self._last(f"no answer for {patience:g} s", self.child.last_line())

    def _last(self, problem: str, last_line: str) -> Message:
        """Return the finding that the process cannot make itself, with the last line that it printed."""
        return Message(self.job.backend, (failure(self.name, f"{problem} at {self.doing}: {last_line}"),), done=True)
