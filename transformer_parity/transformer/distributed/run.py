"""Start and control the processes that perform a run on multiple devices."""

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

WORK = "transformer_parity.transformer.distributed.worker:work"  # entry point of a process
ALL_PLANS = ("numpy", "jax")  # one process can run plans of all sizes, because meshes can leave devices unused
# These runs compare formulas, not speed, so they don't need XLA's optimizations.
LITTLE_OPTIMIZED = {"jax": {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}}


class GroupError(Exception):
    """A run on multiple devices failed, and all of its processes have ended."""


class TrainingGroup:
    """The processes of one framework, which together perform one run at a time.

    Attributes:
        environment: Package versions and settings of the first process; None until the processes are stopped.
    """

    environment: dict[str, str] | None = None

    def __init__(self, team: Team, timeout: float | None) -> None:
        self._team = team
        self._patience = math.inf if timeout is None else timeout

    def train(self, task: TrainingTask) -> list[Seen]:
        """Perform a run, and return one result for each process that controls devices.

        Raises:
            GroupError: If a process ends, fails, or doesn't reply in time.
        """
        self._team.send(task)
        return [seen for seen in self._replies() if seen is not None]

    def stop(self) -> None:
        """Stop the processes."""
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
    """Start the processes of a framework, and stop them at the end of the ``with`` block.

    Args:
        backend: A name in ``PORTS``, or a user's port.
        devices: Total number of devices across all processes.
        processes: Number of processes; None for the framework's default.
        timeout: Seconds without a message after which all processes are stopped. Time that the processes spend waiting
            for a processor is not included. None disables the limit.
        python: Path of the Python interpreter.

    Raises:
        GroupError: If a process fails during shutdown.
        StartError: If the interpreter can't be started.
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
    """Group the plans that can use the same processes. For each group, return the number of devices and the plans."""
    if backend in ALL_PLANS and processes in (None, 1):
        return [(max(plan.devices for plan in plans), list(plans))]
    sizes = dict.fromkeys(plan.devices for plan in plans)
    return [(size, [plan for plan in plans if plan.devices == size]) for size in sizes]
