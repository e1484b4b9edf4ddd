"""Train one model in multiple processes on this machine.

The parent process starts the training processes and reports the messages of the first training process. If a training
process ends early, the parent terminates the other training processes.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

from transformer_parity.apps.train.group import Group
from transformer_parity.apps.train.learner import Where
from transformer_parity.apps.train.run import Observer, Status
from transformer_parity.apps.train.start import Setup
from transformer_parity.engine.processes.children import THREAD_SWITCHES, Children
from transformer_parity.engine.processes.messages import Broken, Parent
from transformer_parity.engine.processes.team import Team, TeamError
from transformer_parity.engine.system.environment import keep_freed_memory
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.interrupts import Stop, stop_on_signal
from transformer_parity.engine.system.machine import processors
from transformer_parity.transformer.distributed.environments import environments
from transformer_parity.transformer.ports.registry import PORTS

WORK = f"{__name__}:work"
# Seconds to wait for the other processes after the first one has joined. This value is shorter than the frameworks'
# timeouts because the frameworks' errors do not identify the missing process.
JOINING = 45.0
PATIENCE = 60.0  # seconds to wait for the processes to exit after all of them have finished training


@dataclass(frozen=True)
class TrainingJob:
    """The description of a run that the parent sends to each process.

    Attributes:
        setup: Initial state of the run.
        backend: Name of the backend.
        directory: Output directory.
        where: Placement, parallelism plan, and process group.
        stop_at: Step at which to stop, or None to train until the last step.
    """

    setup: Setup
    backend: str
    directory: Path
    where: Where
    stop_at: int | None


class Joined:
    """A message that a process sends after it has imported its framework and before it joins the others."""


class Finishing:
    """A message that a process sends after the last step, when it is too late to stop the run and save a checkpoint."""


@dataclass(frozen=True)
class Ended:
    """The last message of a process, which reports the result of the run.

    Attributes:
        step: Number of steps that have been taken.
        seconds: Training time in seconds.
        reached: Dict from the name of each model to its loss and score, or None if the run was stopped before the last
            step.
    """

    step: int
    seconds: float
    reached: dict[str, dict[str, float]] | None


def train(job: TrainingJob, processes: int, observer: Observer, stop: Stop) -> Ended:
    """Train in the given number of child processes.

    The child processes are stopped before this function returns, and also if this process is killed.

    Raises:
        UsageError: If the run cannot start or continue, or if a process has failed or was killed.
        KeyboardInterrupt: If the user presses Ctrl-C twice, or once after all steps have been taken.
    """
    plan = job.where.plan
    if plan is None:
        raise ValueError("training in multiple processes requires a parallelism plan: got None")
    threads = dict.fromkeys(THREAD_SWITCHES, str(max(1, processors() // processes)))
    together = environments(job.backend, plan.devices, processes)
    with Children({**threads, **os.environ}) as children, together as told:
        members = [children.start(WORK) for _ in range(processes)]
        for rank, environment in enumerate(told):
            where = replace(job.where, group=Group(rank, processes))
            members[rank].send((replace(job, where=where), environment))
        try:
            return _listen(Team(children, members), observer, stop)
        except TeamError as error:
            raise _failure(error) from None


def work(parent: Parent) -> None:
    """Train in a child process."""
    job, environment = parent.receive()
    os.environ.update(environment)  # frameworks read these variables when they are imported
    keep_freed_memory()
    send = parent.send if job.where.group.rank == 0 else lambda message: None
    try:
        PORTS[job.backend].import_package()
        parent.send(Joined())
        parent.send(_trained(job, parent, send))
    except Exception as error:
        is_usage = isinstance(error, UsageError)
        parent.send(Broken(str(error) if is_usage else f"{type(error).__name__}: {error}".strip(), is_usage))
        raise  # prints the traceback after the framework's own output


def _trained(job: TrainingJob, parent: Parent, send: Any) -> Ended:
    with stop_on_signal() as stop:
        Thread(target=_heed, args=(parent, stop), daemon=True).start()
        with refusals(RuntimeError, TypeError, ValueError):
            training = job.setup.start([job.backend], job.directory, Observer(send, send), job.where)
        send(training.description)
        training.go(stop, job.stop_at)
    if stop.signal or training.step < job.setup.plan.steps:
        return Ended(training.step, training.seconds, None)
    send(Finishing())
    return Ended(training.step, training.seconds, training.finish())


def _heed(parent: Parent, stop: Stop) -> None:
    """Wait for the parent's request to stop."""
    with suppress(EOFError):  # the parent has ended, so this process will also end
        stop.signal = parent.receive()


def _listen(team: Team, observer: Observer, stop: Stop) -> Ended:
    """Pass the messages of the first process to the observer, and return the last message of the first process."""
    told, interruptible = False, True
    awaited, since = list(range(len(team))), math.inf
    ended: dict[int, Ended] = {}

    def check() -> None:
        nonlocal told
        if awaited and time.monotonic() - since > JOINING:
            missing = team.where(awaited[0])
            raise UsageError(
                f"{missing} did not join the other processes within {JOINING:g} s, so all processes were stopped"
            )
        if stop.signal and not told:
            if not interruptible:
                raise KeyboardInterrupt
            told = True
            team.send(stop.signal)

    for rank, message in team.listen(until=Ended, pulse=check):
        match message:
            case Joined():
                awaited.remove(rank)
                since = min(since, time.monotonic())
            case Status():
                observer.status(message)
            case str():
                observer.say(message)
            case Finishing():
                interruptible = False
            case Ended():
                ended[rank] = message
    team.stop(PATIENCE)  # give the processes time to exit, so that the frameworks can close their connections
    return ended[0]


def _failure(error: TeamError) -> UsageError:
    """Return the error to raise if a process has failed."""
    cause = error.cause
    if isinstance(cause, Broken) and cause.is_usage:
        return UsageError(cause.why)
    said = cause.why if isinstance(cause, Broken) else str(cause)
    return UsageError(f"{error.where} failed, so the other processes were stopped: {said}")
