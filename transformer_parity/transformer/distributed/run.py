"""The processes of a run on several devices: as many as the framework wants, each with an environment of its own."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformer_parity.engine.processes.children import THREAD_SWITCHES, Children
from transformer_parity.engine.processes.team import Team, TeamError
from transformer_parity.transformer.distributed.environments import environments, number_of_processes
from transformer_parity.transformer.distributed.worker import Seen, TrainingTask
from transformer_spec.parallel_plan import Plan

WORK = "transformer_parity.transformer.distributed.worker:work"  # what a process runs
ALL_PLANS = ("numpy", "jax")  # in one process: a mesh may leave devices out; others want processes for each size
# In float64 the formulas are compared, not what XLA makes of them.
LITTLE_OPTIMIZED = {"jax": {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}}


class GroupError(Exception):
    """A run on several devices did not come to its end; all of its processes have ended."""


class TrainingGroup:
    """The processes of one framework that train together, one run after another.

    Attributes:
        environment: Versions and switches, as the first process has them when all are stopped.
    """

    environment: dict[str, str] | None = None

    def __init__(self, team: Team, timeout: float | None) -> None:
        self._team = team
        self._patience = math.inf if timeout is None else timeout

    def train(self, task: TrainingTask) -> list[Seen]:
        """Return what each process saw of a run; those that leave all devices to another saw nothing.

        Raises:
            GroupError: A process ended or said nothing for too long; or it could not go on, as it says.
        """
        self._team.send(task)
        return [seen for seen in self._replies() if seen is not None]

    def stop(self) -> None:
        """End the processes."""
        if not self._team.is_over:
            self._team.send(None)
            self.environment = self._replies()[0]
            self._team.stop()

    def _replies(self) -> list:
        try:
            return self._team.replies(self._patience)
        except TeamError as error:
            raise GroupError(str(error)) from error


@contextmanager
def group(
    backend: str,
    devices: int,
    processes: int | None = None,
    timeout: float | None = None,
    python: str = sys.executable,
) -> Iterator[TrainingGroup]:
    """Start the processes of a framework that have so many devices; they end with the block.

    Args:
        backend: A name of ``PORTS``.
        devices: How many devices all processes have together.
        processes: How many there are; None is one for each device in PyTorch, else one.
        timeout: Seconds of silence of a process, without those of waiting for a processor, after which all are ended;
            None waits for ever.
        python: The interpreter that runs them.

    Raises:
        GroupError: A process did not end as it should.
        StartError: The interpreter cannot be started.
    """
    count = processes or number_of_processes(backend, Plan(data=devices), None)
    together = environments(backend, devices, count)
    with Children({**os.environ, **dict.fromkeys(THREAD_SWITCHES, "1")}) as children, together as told:
        started = [children.start(WORK, python) for _ in told]
        for process, environment in zip(started, told, strict=True):
            process.send((backend, environment | LITTLE_OPTIMIZED.get(backend, {})))
        found = TrainingGroup(Team(children, started), timeout)
        yield found
        found.stop()


def devices_needed(backend: str, plans: Sequence[Plan], processes: int | None) -> list[tuple[int, list[Plan]]]:
    """Return groups of so many processes that train on all plans: how many devices each has, and its plans."""
    if backend in ALL_PLANS and processes in (None, 1):
        return [(max(plan.devices for plan in plans), list(plans))]
    sizes = dict.fromkeys(plan.devices for plan in plans)
    return [(size, [plan for plan in plans if plan.devices == size]) for size in sizes]
