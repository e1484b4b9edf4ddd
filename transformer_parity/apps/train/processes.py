"""Train one model in several processes of this machine: start them, listen to the first, and end all with any."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

from transformer_parity.apps.train.group import Group
from transformer_parity.apps.train.learner import Where
from transformer_parity.apps.train.run import Observer, Status
from transformer_parity.apps.train.start import Setup
from transformer_parity.engine.system.child import THREAD_SWITCHES, Child, ChildEndedError, Children
from transformer_parity.engine.system.environment import keep_freed_memory
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.interrupts import Stop, stop_on_signal
from transformer_parity.engine.system.machine import processors
from transformer_parity.engine.system.messages import Parent
from transformer_parity.transformer.distributed.environments import environments
from transformer_parity.transformer.ports.registry import PORTS

WORK = f"{__name__}:work"
CAUSE = 2.0  # seconds for the process that failed first to say so: others fail because it is gone
CHECKED = 0.2  # seconds between two looks at Ctrl-C
JOINING = 45.0  # seconds for the last to come after the first: less than frameworks wait, which name none
PATIENCE = 60.0  # seconds for the others to end when the first has


@dataclass(frozen=True)
class Job:
    """A run, and where it is: what each process is told."""

    setup: Setup
    backend: str
    folder: Path
    where: Where
    stop_at: int | None


class Here:
    """A process has come, and joins the others."""


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


@dataclass(frozen=True)
class Failed:
    """What went wrong in a process, and when."""

    message: str
    at: float
    is_usage: bool


def train(job: Job, processes: int, observer: Observer, stop: Stop) -> Ended:
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
        return _listen(children, members, observer, stop)


def work(parent: Parent) -> None:
    """Train the part of one process."""
    job, environment = parent.receive()
    os.environ.update(environment)  # before the framework is imported
    keep_freed_memory()
    send = parent.send if job.where.group.rank == 0 else lambda message: None
    try:
        PORTS[job.backend].import_package()
        parent.send(Here())
        parent.send(_trained(job, parent, send))
    except Exception as error:
        message = f"{type(error).__name__}: {error}".strip()
        is_usage = isinstance(error, UsageError)
        parent.send(Failed(str(error) if is_usage else message, time.time(), is_usage))
        raise  # its traceback is behind what the framework has printed
    finally:
        parent.send(None)


def _trained(job: Job, parent: Parent, send: Any) -> Ended:
    with stop_on_signal() as stop:
        Thread(target=_heed, args=(parent, stop), daemon=True).start()
        with refusals(RuntimeError, TypeError, ValueError):
            training = job.setup.start([job.backend], job.folder, Observer(send, send), job.where)
        send(training.description)
        training.go(stop, job.stop_at)
    if stop.signal or training.step < job.setup.plan.steps:
        return Ended(training.step, training.seconds, None)
    send(None)  # from here on, nothing is left to be stopped in between
    return Ended(training.step, training.seconds, training.finish())


def _heed(parent: Parent, stop: Stop) -> None:
    """Stop when told to."""
    with suppress(EOFError):  # the parent has ended, and this process will
        stop.signal = parent.receive()


def _listen(children: Children, members: list[Child], observer: Observer, stop: Stop) -> Ended:
    """Pass on what the first process says, and return how it ended."""
    told, interruptible, ended, left = False, True, None, list(members)
    awaited, since = list(members), math.inf
    while left:
        if awaited and time.monotonic() - since > JOINING:
            missing = f"process {members.index(awaited[0])} of {len(members)}"
            raise UsageError(f"{missing} has not joined the others in {JOINING:g} s, and they were ended")
        if stop.signal and not told:
            if not interruptible:
                raise KeyboardInterrupt
            told = True
            for member in left:
                member.send(stop.signal)
        for member in children.wait(left, CHECKED):
            try:
                message = member.receive()
            except ChildEndedError as error:
                raise _failure(children, members, member, error) from None
            if isinstance(message, Failed):
                raise _failure(children, members, member, message)
            if isinstance(message, Here):
                awaited.remove(member)
                since = min(since, time.monotonic())
            elif isinstance(message, Status):
                observer.status(message)
            elif isinstance(message, str):
                observer.say(message)
            elif isinstance(message, Ended):
                left.remove(member)
                ended = message if member is members[0] else ended
            else:
                interruptible = False
    if ended is None:
        raise ValueError("the first process has not said how it ended")
    with _patiently(children, members):
        return ended


@contextmanager
def _patiently(children: Children, members: list[Child]) -> Iterator[None]:
    """Let processes end by themselves: frameworks say goodbye to one another."""
    yield
    deadline = time.monotonic() + PATIENCE
    for member in members:
        children.stop(member, max(0.0, deadline - time.monotonic()))


def _failure(children: Children, members: list[Child], first: Child, what: Any) -> UsageError:
    """Return what has ended the run: a process that was killed, or else the one that failed first."""
    found: dict[int, Any] = {members.index(first): what}
    deadline = time.monotonic() + CAUSE
    left = [member for member in members if member is not first]
    while left and time.monotonic() < deadline:
        for member in children.wait(left, CHECKED):
            try:
                message = member.receive()
            except ChildEndedError as error:
                message = error
            if isinstance(message, Failed | ChildEndedError):
                found.setdefault(members.index(member), message)
                left.remove(member)
    for _, one in sorted(found.items(), key=lambda member: member[0]):  # what the first refuses, most others do too
        if isinstance(one, Failed) and one.is_usage:
            return UsageError(one.message)
    rank = min(found, key=lambda rank: getattr(found[rank], "at", 0.0))
    said = getattr(found[rank], "message", None) or str(found[rank])
    return UsageError(f"process {rank} of {len(members)} failed, and the others were ended: {said}")
