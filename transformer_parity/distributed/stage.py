"""The stage ``distributed`` of a check: on each plan a whole run, one that goes on from elsewhere, and hard cases."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import reference_numpy
from reference_numpy.parallel_plan import Plan
from transformer_parity.cases.case import Case
from transformer_parity.compare.findings import Finding, failure
from transformer_parity.compare.verdict import Author
from transformer_parity.distributed.cases import STAGE, probes
from transformer_parity.distributed.compare import Run, draws, findings
from transformer_parity.distributed.run import Group, RunError, devices_needed
from transformer_parity.distributed.worker import Seen, Task, train

USUAL = tuple(map(Plan.parse, ("data=2", "fsdp=2", "tensor=2")))
OFFERED = {"tf": USUAL[:1]}  # of these, where a framework has not all
WHOLE_RUN = STAGE[0]  # from its middle, another run goes on on the next plan

Start = Callable[[int], AbstractContextManager[Group]]  # of processes that have so many devices


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
    """

    def __init__(self, asked: Sequence[Plan], processes: int | None = None) -> None:
        self.asked, self.processes = asked, processes
        whole = probes()[WHOLE_RUN]
        self._left = _in_reference(Run(whole, Plan())).snapshots[whole.halfway]
        self._left_by = "numpy on one device"

    def plans(self, backend: str) -> Sequence[Plan]:
        """Return the plans of a framework."""
        return self.asked or OFFERED.get(backend, USUAL)

    def cases(self, backend: str) -> list[Case]:
        """Return what is compared of a framework."""
        return [run.case for plan in self.plans(backend) for run in self._runs(plan)]

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
                except RunError as error:  # while they end
                    yield Step(findings=[failure(backend, str(error))])

    def _runs(self, plan: Plan) -> list[Run]:
        named, known = bool(self.asked), probes()
        runs = [Run(known[name], plan, named=named) for name in STAGE]
        return [runs[0], Run(known[WHOLE_RUN], plan, self._left, self._left_by, named), *runs[1:]]

    def _on_plan(self, backend: str, plan: Plan, processes: Group) -> Generator[Step, None, bool]:
        """Train on one plan; return whether a run failed, after which there are no processes any more."""
        runs = self._runs(plan)
        for number, run in enumerate(runs):
            yield Step(run.case.name)
            try:
                seen = processes.train(Task(run.probe, plan, run.start))
                if seen[0].refused:
                    yield from (Step(findings=findings(backend, other, seen, Seen())) for other in runs)
                    return False
                expected = processes.train(Task(run.probe))[0] if draws(run.probe) else _in_reference(run)
            except RunError as error:
                yield from (Step(findings=[_failed(backend, other, error)]) for other in runs[number:])
                return True
            yield Step(findings=findings(backend, run, seen, expected))
            if run is runs[0]:
                self._left, self._left_by = seen[0].snapshots[run.probe.halfway], f"{backend} on {plan}"
        return False


def _failed(backend: str, run: Run, error: RunError) -> Finding:
    return Author(backend, "float64", run.case).failed("run", str(error))


def _in_reference(run: Run) -> Seen:
    """Return a run on one device, in the reference."""
    if run.start is not None:
        return train(reference_numpy, Task(run.probe, None, run.start))
    return _from_the_beginning(run.probe.name)


@cache
def _from_the_beginning(name: str) -> Seen:
    return train(reference_numpy, Task(probes()[name]))
