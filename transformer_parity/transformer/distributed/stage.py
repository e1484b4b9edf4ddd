"""The stage ``distributed`` of a check: on each plan a whole run, one that goes on from elsewhere, and hard cases."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache

import reference_numpy
from transformer_parity.engine.findings import Finding, failure
from transformer_parity.engine.processes.child import StartError
from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.distributed.cases import NOT_OFFERED, STAGE, Probe, port_probes, probes, rounded
from transformer_parity.transformer.distributed.compare import Run, draws, findings
from transformer_parity.transformer.distributed.run import GroupError, TrainingGroup, devices_needed
from transformer_parity.transformer.distributed.worker import Seen, Task, train
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.parallel_plan import Plan

USUAL = tuple(map(Plan.parse, ("data=2", "fsdp=2", "tensor=2")))
OFFERED = {"tf": USUAL[:1]}  # of these, where a framework has not all
OF_A_PORT = USUAL[:1]  # likewise, of the user's own
WHOLE_RUN = STAGE[0]  # from its middle, another run goes on on the next plan

Start = Callable[[int], AbstractContextManager[TrainingGroup]]  # of processes that have so many devices


@dataclass(frozen=True)
class Step:
    """What a check does next, or what came of what it did.

    Attributes:
        doing: What it does next.
        findings: All comparisons of one run.
        environment: Versions and switches of the processes.
    """

    doing: str = ""
    findings: Sequence[Finding] = ()
    environment: dict[str, str] | None = None


class Check:
    """The runs of one framework after another; where one was left in its middle, the next goes on.

    Args:
        asked: The plans that were named; none is the usual ones of each framework.
        processes: How many share the devices of a plan; None is what is usual for each framework.
        dtypes: In which to train.
    """

    def __init__(self, asked: Sequence[Plan], processes: int | None = None, dtypes: Sequence[str] = ALL_DTYPES) -> None:
        self.asked, self.processes, self.dtypes = asked, processes, dtypes
        whole = probes()[WHOLE_RUN]
        self._left = _in_reference(whole).snapshots[whole.halfway]
        self._left_by = "numpy on one device"

    def plans(self, backend: str) -> Sequence[Plan]:
        """Return the plans of a framework."""
        return self.asked or OFFERED.get(backend, USUAL if backend in PORTS else OF_A_PORT)

    def cases(self, backend: str) -> list[Case]:
        """Return what is compared of a framework."""
        return [run.case for plan in self.plans(backend) for run in self._runs(backend, plan)]

    def steps(self, backend: str, start: Start) -> Iterator[Step]:
        """Train on every plan of a framework, in processes that ``start`` starts."""
        for devices, plans in devices_needed(backend, self.plans(backend), self.processes):
            waiting = [*plans]
            while waiting:  # new processes after a failure
                try:
                    with start(devices) as processes:
                        failed = False
                        while waiting and not failed:
                            failed = yield from self._on_plan(backend, waiting.pop(0), processes)
                    yield Step(environment=processes.environment)
                except StartError as error:  # nor can any others be
                    yield Step(findings=[failure(backend, str(error))])
                    return
                except GroupError as error:  # while they end
                    yield Step(findings=[failure(backend, str(error))])

    def _runs(self, backend: str, plan: Plan) -> list[Run]:
        named, known = bool(self.asked), {**probes(), **rounded()}
        if backend in PORTS:
            runs = [Run(known[name], plan, named=named) for name in STAGE if name not in NOT_OFFERED.get(backend, ())]
            runs.insert(1, Run(known[WHOLE_RUN], plan, self._left, self._left_by, named))
        else:
            runs = [Run(probe, plan, named=named) for probe in port_probes()]
        return [run for run in runs if run.probe.dtype in self.dtypes]

    def _on_plan(self, backend: str, plan: Plan, processes: TrainingGroup) -> Generator[Step, None, bool]:
        """Train on one plan; return whether a run failed, after which there are no processes any more."""
        title = backend.rpartition(":")[2]
        runs = self._runs(backend, plan)
        for number, run in enumerate(runs):
            yield Step(run.case.name)
            try:
                seen = processes.train(Task(run.probe, plan, run.start))
                if seen[0].refused:
                    yield from (Step(findings=findings(title, other, seen, Seen())) for other in runs)
                    return False
                if (own := seen[0].config) is not None:
                    run = replace(run, probe=replace(run.probe, config=own))
                expected, baseline = _on_one_device(run, processes)
            except GroupError as error:
                yield from (Step(findings=[_failed(title, other, error)]) for other in runs[number:])
                return True
            yield Step(findings=findings(title, run, seen, expected if own is None else _of_a_port(expected), baseline))
            if run is runs[0] and run.probe.name == WHOLE_RUN:
                self._left, self._left_by = seen[0].snapshots[run.probe.halfway], f"{backend} on {plan}"
        return False


def _failed(backend: str, run: Run, error: GroupError) -> Finding:
    return run.case.author(backend, run.probe.dtype).failed("run", str(error))


def _on_one_device(run: Run, processes: TrainingGroup) -> tuple[Seen, Seen | None]:
    """Return what a run must give, and below float64 what the same rounding gives on one device."""
    probe = run.probe
    if draws(probe):
        return processes.train(Task(probe))[0], None
    if run.start is not None:
        return train(reference_numpy, Task(probe, None, run.start)), None
    if probe.dtype == "float64":
        return _in_reference(probe), None
    baseline = processes.train(Task(probe))[0] if probe.settings.mixed_bfloat16 else _in_reference(probe)
    return _in_reference(probe.exact), baseline


def _of_a_port(seen: Seen) -> Seen:
    """Return what is asked of a port of the user's own."""
    weights = {step: replace(snapshot, state=None) for step, snapshot in seen.snapshots.items()}
    return replace(seen, tokens=[], norms=[], snapshots=weights)


@cache
def _in_reference(probe: Probe) -> Seen:
    """Return a run on one device, in the reference."""
    return train(reference_numpy, Task(probe))
