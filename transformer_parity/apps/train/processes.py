"""Train one model in several processes of this machine: start them, listen to the first, and end all with any."""

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
JOINING = 45.0  # seconds for the last to come after the first: less than frameworks wait, which name none
PATIENCE = 60.0  # seconds for the others to end when the first has


@dataclass(frozen=True)
class TrainingJob:
    """A run, and where it is: what each process is told."""

    setup: Setup
    backend: str
    folder: Path
    where: Where
    stop_at: int | None


class Joined:
    """A process has imported its framework, and joins the others."""


class Finishing:
    """All steps are taken: nothing is left that could be stopped in between."""


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        step: Steps taken.
        seconds: Of training.
        reached: Loss and score by model; None if the run was stopped before.
    """

    step: int
    seconds: float
    reached: dict[str, dict[str, float]] | None


def train(job: TrainingJob, processes: int, observer: Observer, stop: Stop) -> Ended:
    """Train in so many processes, which all end with this one, and return how that ended.

    Raises:
        UsageError: The run cannot begin or go on, or one of the processes has failed or was killed.
        KeyboardInterrupt: The second Ctrl-C; or the first, when all steps are taken.
    """
    plan = job.where.plan
    if plan is None:
        raise ValueError("processes train one model together by a plan: got none")
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
    """Train the part of one process."""
    job, environment = parent.receive()
    os.environ.update(environment)  # before the framework is imported
    keep_freed_memory()
    send = parent.send if job.where.group.rank == 0 else lambda message: None
    try:
        PORTS[job.backend].import_package()
        parent.send(Joined())
        parent.send(_trained(job, parent, send))
    except Exception as error:
        is_usage = isinstance(error, UsageError)
        parent.send(Broken(str(error) if is_usage else f"{type(error).__name__}: {error}".strip(), is_usage))
        raise  # its traceback is behind what the framework has printed


def _trained(job: TrainingJob, parent: Parent, send: Any) -> Ended:
    with stop_on_signal() as stop:
        Thread(target=_heed, args=(parent, stop), daemon=True).start()
        with refusals(RuntimeError, TypeError, ValueError):
            training = job.setup.start([job.backend], job.folder, Observer(send, send), job.where)
        send(training.description)
        training.go(stop, job.stop_at)
    if stop.signal or training.step < job.setup.plan.steps:
        return Ended(training.step, training.seconds, None)
    send(Finishing())
    return Ended(training.step, training.seconds, training.finish())


def _heed(parent: Parent, stop: Stop) -> None:
    """Stop when told to."""
    with suppress(EOFError):  # the parent has ended, and this process will
        stop.signal = parent.receive()


def _listen(team: Team, observer: Observer, stop: Stop) -> Ended:
    """Pass on what the first process says, and return how it ended."""
    told, interruptible = False, True
    awaited, since = list(range(len(team))), math.inf
    ended: dict[int, Ended] = {}

    def check() -> None:
        nonlocal told
        if awaited and time.monotonic() - since > JOINING:
            missing = team.where(awaited[0])
            raise UsageError(f"{missing} has not joined the others in {JOINING:g} s, and they were ended")
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
    team.stop(PATIENCE)  # by themselves: frameworks say goodbye to one another
    return ended[0]


def _failure(error: TeamError) -> UsageError:
    """Return the message of a run that a process has ended."""
    cause = error.cause
    if isinstance(cause, Broken) and cause.is_usage:
        return UsageError(cause.why)
    said = cause.why if isinstance(cause, Broken) else str(cause)
    return UsageError(f"{error.where} failed, and the others were ended: {said}")
