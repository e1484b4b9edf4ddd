"""Check that training with each parallelism plan gives the same results as training on one device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import reference_numpy
from transformer_parity.engine.findings import Finding, failure
from transformer_parity.engine.processes.child import StartError
from transformer_parity.engine.verdict import Coverage
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.check.checked_port import CheckedPort, give_labels
from transformer_parity.transformer.check.messages import CaseCompared, NowDoing, PortFinished, PortImported, PortJob
from transformer_parity.transformer.distributed.cases import (
    DISTRIBUTED,
    NOT_OFFERED,
    STAGE,
    Probe,
    port_probes,
    probes,
    rounded,
)
from transformer_parity.transformer.distributed.compare import DeviceRun, draws, findings
from transformer_parity.transformer.distributed.environments import number_of_processes
from transformer_parity.transformer.distributed.run import GroupError, TrainingGroup, devices_needed, group
from transformer_parity.transformer.distributed.worker import Seen, Snapshot, TrainingTask, train
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.parallel_plan import Plan

DTYPES = ("float64", "float32")
USUAL = tuple(map(Plan.parse, ("data=2", "fsdp=2", "tensor=2")))
OFFERED = {"tf": USUAL[:1]}  # TensorFlow doesn't support other plans
OF_A_PORT = USUAL[:1]  # default plan for user ports
WHOLE_RUN = STAGE[0]  # other frameworks resume this run halfway

Start = Callable[[int], AbstractContextManager[TrainingGroup]]  # starts the processes for a given number of devices


@dataclass
class DistributedCheck:
    """Checks all frameworks, one at a time. Each framework also resumes a run that the previous framework started.

    Attributes:
        backends: Backends to check.
        ports: The user's ports, as ``module:class`` or as names of entry points.
        asked: Requested plans; empty for the default plans of each framework.
        processes: Number of processes among which the devices of a plan are divided; None for the default of each
            framework.
        dtypes: Requested dtypes; None for all dtypes.

    Raises:
        ValueError: If a framework doesn't support a plan with this number of processes.
    """

    backends: Sequence[str] = ()
    ports: Sequence[str] = ()
    asked: Sequence[Plan] = ()
    processes: int | None = None
    dtypes: Sequence[str] | None = None
    _left: tuple[Snapshot, str] | None = field(
        default=None, init=False
    )  # snapshot halfway through a run, and a phrase that names the run's framework and plan

    def __post_init__(self) -> None:
        for name in self.named if self.processes else ():
            for plan in self.plans(name):
                number_of_processes(name, plan, self.processes)

    @property
    def named(self) -> list[str]:
        """All ports and backends to check."""
        return [*self.ports, *self.backends]

    @property
    def setting(self) -> Placements:
        """Dtypes, device, and precision of the runs."""
        return Placements(DTYPES if self.dtypes is None else self.dtypes)

    def plans(self, backend: str) -> Sequence[Plan]:
        """Return the plans to check for a framework: the requested plans, or its default plans."""
        return self.asked or OFFERED.get(backend, USUAL if backend in PORTS else OF_A_PORT)

    def cases(self, backend: str) -> list[Case]:
        """Return the cases for a framework or a port, one case per run."""
        return [run.case for plan in self.plans(backend) for run in self._runs(backend, plan)]

    def checked_ports(self) -> list[CheckedPort]:
        """Return all ports with their cases."""
        return [CheckedPort(PortJob(name, self.setting), self.cases(name), [DISTRIBUTED]) for name in self.named]

    def asked_of(self, port: CheckedPort) -> Coverage:
        """Return the coverage that a complete check of a port requires."""
        planned = Counter((DISTRIBUTED, case.dtypes[0]) for case in port.cases)
        return Coverage(port.label, (DISTRIBUTED,), tuple(self.dtypes or ()), self.dtypes is not None, planned)

    def not_tested(self) -> list[str]:
        """Return a description of each kind of comparison that this check omits.

        A description usually names an option or a different command.
        """
        found = []
        if self.backends:
            found = [f"{name} (not in --backends)" for name in PORTS if name not in ("numpy", *self.backends)]
        if unnamed := [dtype for dtype in DTYPES if dtype not in self.setting.dtypes]:
            found.append(f"{' and '.join(unnamed)} (not in --dtype)")
        if self.ports:
            found.append("the rows that each device reads in ports with one_process")
        return [*found, "one device (use `parity check`)", "gpu (multiple devices are compared on CPUs)"]

    def run(
        self,
        ports: Sequence[CheckedPort],
        *,
        interpreters: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Iterator[tuple[CheckedPort, Any]]:
        """Check one port at a time, and yield each message with its port, as ``check.processes.run_all`` does.

        Args:
            ports: Ports from ``checked_ports``.
            interpreters: Dict from port names to the paths of their Python interpreters. All other ports use the
                current interpreter.
            timeout: Seconds without a message after which a process is stopped, as in ``run_all``.
        """
        give_labels(ports)
        for port in ports:
            name = port.job.backend
            port.cases = port.given or ()
            yield port, PortImported(port.label)
            python = (interpreters or {}).get(name, sys.executable)
            start = partial(group, name, processes=self.processes, timeout=timeout, python=python)
            for message in self.steps(port, start):
                port.keep(message)
                yield port, message
            finished = PortFinished(port.environment)
            port.keep(finished)
            yield port, finished

    def steps(self, port: CheckedPort, start: Start) -> Iterator[NowDoing | CaseCompared]:
        """Train with each plan of a framework, and yield the messages.

        ``start`` starts the processes. The function stores their environment in the port.
        """
        backend = port.job.backend
        for devices, plans in devices_needed(backend, self.plans(backend), self.processes):
            waiting = [*plans]
            while waiting:  # after a failure, start new processes for the remaining plans
                try:
                    with start(devices) as processes:
                        failed = False
                        while waiting and not failed:
                            failed = yield from self._on_plan(port, waiting.pop(0), processes)
                    port.environment = processes.environment or port.environment
                except StartError as error:  # the remaining plans would fail in the same way
                    yield CaseCompared([failure(port.label, str(error))])
                    return
                except GroupError as error:  # a process failed during shutdown
                    yield CaseCompared([failure(port.label, str(error))])

    def _runs(self, backend: str, plan: Plan) -> list[DeviceRun]:
        named, known = bool(self.asked), {**probes(), **rounded()}
        if backend in PORTS:
            names = [name for name in STAGE if name not in NOT_OFFERED.get(backend, ())]
            runs = [DeviceRun(known[name], plan, named=named) for name in names]
            runs.insert(1, DeviceRun(known[WHOLE_RUN], plan, named=named, resumes=True))
        else:
            runs = [DeviceRun(probe, plan, named=named) for probe in port_probes()]
        return [run for run in runs if run.probe.dtype in self.setting.dtypes]

    def _on_plan(
        self, port: CheckedPort, plan: Plan, processes: TrainingGroup
    ) -> Generator[NowDoing | CaseCompared, None, bool]:
        """Train with one plan. Return True if a run failed and its processes have therefore ended."""
        label, backend = port.label, port.job.backend
        runs = [self._resumed(run) if run.resumes else run for run in self._runs(backend, plan)]
        for number, run in enumerate(runs):
            yield NowDoing(run.case.name)
            try:
                seen = processes.train(TrainingTask(run.probe, plan, run.start))
                if seen[0].refused:
                    yield from (CaseCompared(findings(label, other, seen, Seen())) for other in runs)
                    return False
                if (own := seen[0].config) is not None:
                    run = replace(run, probe=replace(run.probe, config=own))
                expected, baseline = _on_one_device(run, processes)
            except GroupError as error:
                yield from (CaseCompared([_failed(label, other, error)]) for other in runs[number:])
                return True
            wanted = expected if own is None else _of_a_port(expected)
            yield CaseCompared(findings(label, run, seen, wanted, baseline))
            if run is runs[0] and run.probe.name == WHOLE_RUN:
                self._left = seen[0].snapshots[run.probe.halfway], f"{backend} on {plan}"
        return False

    def _resumed(self, run: DeviceRun) -> DeviceRun:
        """Return a copy of the run that starts from a snapshot.

        The snapshot was written by the previous framework or, for the first framework, by the reference.
        """
        start, origin = self._left or (_in_reference(run.probe).snapshots[run.probe.halfway], "numpy on one device")
        return replace(run, start=start, origin=origin)


def _failed(backend: str, run: DeviceRun, error: GroupError) -> Finding:
    return run.case.author(backend, run.probe.dtype).failed("run", str(error))


def _on_one_device(run: DeviceRun, processes: TrainingGroup) -> tuple[Seen, Seen | None]:
    """Return a run's expected results and, if the run's precision is lower than float64, results in this precision."""
    probe = run.probe
    if draws(probe):
        return processes.train(TrainingTask(probe))[0], None
    if run.start is not None:
        return train(reference_numpy, TrainingTask(probe, None, run.start), fast=False), None
    if probe.dtype == "float64":
        return _in_reference(probe), None
    baseline = processes.train(TrainingTask(probe))[0] if probe.settings.mixed_bfloat16 else _in_reference(probe)
    return _in_reference(probe.exact), baseline


def _of_a_port(seen: Seen) -> Seen:
    """Return only those expected results that user ports also return."""
    weights = {step: replace(snapshot, state=None) for step, snapshot in seen.snapshots.items()}
    return replace(seen, tokens=[], norms=[], snapshots=weights)


@cache
def _in_reference(probe: Probe) -> Seen:
    """Run the reference on one device, and return the results."""
    return train(reference_numpy, TrainingTask(probe), fast=False)
