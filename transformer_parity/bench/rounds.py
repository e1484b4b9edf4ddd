"""A process for each participant, and interleaved rounds: in each, everybody runs once, while all others wait."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from transformer_parity.bench.measurements import Entry
from transformer_parity.bench.verify import DisagreementError
from transformer_parity.compare.verdict import AGREES, DIVERGES, FAILED
from transformer_parity.system.child import PATIENCE, THREAD_SWITCHES
from transformer_parity.system.machine import forget_peak, held_bytes, peak_bytes

SWITCHES = (*THREAD_SWITCHES, "VECLIB_MAXIMUM_THREADS")
# What Python has to say of semaphores that torch.compile's own processes leave behind when they are ended with ours.
QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"
PAUSE = 0.25  # seconds between two runs: threads that are out of work go on spinning for up to 0.2 (Intel's OpenMP)


class Participant(Protocol):
    """What runs in a process. It is sent there before it has imported anything."""

    @property
    def name(self) -> str:
        """What it is called in tables."""

    @property
    def has_result(self) -> bool:
        """Whether there is a result to agree about."""

    def check_installed(self) -> None:
        """Raise MissingFrameworkError, with the install line, unless everything needed can be found."""

    def prepare(self) -> dict[str, str]:
        """Import what is needed, and return versions, devices and switches."""

    def load(self, work: Any, weights: Path) -> None:
        """Get ready to do some work with a weight file."""

    def run(self) -> Any:
        """Do the work: what is timed."""

    def result(self, found: Any) -> Any:
        """Return what ``run`` found, in the form in which it is verified."""

    def show(self) -> Any:
        """Do it again, and return every step: where the result alone is not enough to verify it."""


Verify = Callable[[Any, Callable[[], Any]], str]  # takes a result, and what shows its steps; returns its near-ties
Tell = Callable[[str, str], None]  # is told a participant's name and what it does now


@dataclass(frozen=True)
class Reply:
    """What a call in another process returned, and what it took.

    Attributes:
        answer: What it returned.
        seconds: How long it took.
        processor_seconds: How long all its threads together kept processors busy.
        peak_bytes: The most memory that the process held during the call, or before it where the system cannot forget
            an earlier peak; None where it does not say.
        held_bytes: The memory that the process held afterwards; None where the system does not say.
    """

    answer: Any
    seconds: float
    processor_seconds: float
    peak_bytes: int | None = None
    held_bytes: int | None = None


class RacerError(Exception):
    """A call in another process failed, or the process died; the message says how."""


class Racer:
    """A participant in a process of its own, and the pipe to it."""

    def __init__(self, participant: Participant, entry: Entry, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.entry = entry
        self.log = folder / f"{participant.name}.log"
        self.log.touch()
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=_work, args=(participant, other_end, self.log), daemon=True)
        self.process.start()
        other_end.close()  # ours, so that the end of the process is the end of the pipe

    def ask(self, method: str, *arguments: Any) -> Reply:
        """Call a method of the participant and wait for its reply."""
        self.send(method, *arguments)
        return self.receive(method)

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the participant, whose reply has to be received later."""
        with contextlib.suppress(OSError):  # of a dead process: said when its reply is missing
            self.connection.send((method, arguments))

    def receive(self, method: str) -> Reply:
        """Wait for the reply to a call.

        Raises:
            RacerError: The call raised an error, or the process is dead.
        """
        try:
            reply = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            last = self.log.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["it printed nothing"]
            message = f"the process ended with exit code {self.process.exitcode} in {method}: {last[0]}"
            raise RacerError(message) from None
        if isinstance(reply, str):
            raise RacerError(reply)
        return reply


@contextmanager
def started(participants: Sequence[Participant], entries: Sequence[Entry], threads: int) -> Iterator[list[Racer]]:
    """Start a process for each participant, all importing at the same time; they end with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        racers: list[Racer] = []
        try:
            switches = dict.fromkeys(SWITCHES, str(threads))  # read when NumPy or a framework is imported
            with _environment({**switches, "PYTHONWARNINGS": QUIET}):
                for participant, entry in zip(participants, entries, strict=True):
                    racers.append(Racer(participant, entry, Path(folder)))
            for racer in racers:
                racer.send("prepare")
            yield racers
        finally:  # whatever they are at: frameworks have been seen to hang at exit
            for racer in racers:
                racer.process.kill()
            for racer in racers:
                racer.process.join()
                racer.connection.close()


def race(racers: Sequence[Racer], work: Any, weights: Path, rounds: int, verify: Verify, tell: Tell) -> None:
    """Let everybody load and warm up, one after another, then run in interleaved rounds.

    Each entry keeps what came of it, so that an interruption loses the current run only. Who fails or returns a wrong
    result is out.

    Args:
        racers: Whose ``prepare`` has been called.
        work: What there is to do.
        weights: The weight file.
        rounds: How often everybody runs.
        verify: Raises DisagreementError if a result is wrong.
        tell: Told what is about to happen.
    """
    for racer in racers:
        tell(racer.entry.name, "importing")
        with _out_on_failure(racer.entry):
            racer.entry.environment = racer.receive("prepare").answer
    for racer in _still_in(racers):
        with _out_on_failure(racer.entry):
            tell(racer.entry.name, "loading")
            racer.entry.loaded_bytes = racer.ask("load", work, weights).held_bytes
            tell(racer.entry.name, "first call")
            racer.entry.first_seconds = _run(racer, verify).seconds
            tell(racer.entry.name, "warming up")
            _run(racer, verify)
    for number in range(rounds):
        shift = number % len(racers)
        for racer in _still_in([*racers[shift:], *racers[:shift]]):
            tell(racer.entry.name, f"round {number + 1} of {rounds}")
            with _out_on_failure(racer.entry):
                reply = _run(racer, verify)
                racer.entry.seconds.append(reply.seconds)
                racer.entry.cores.append(reply.processor_seconds / reply.seconds)
                if reply.peak_bytes is not None:
                    racer.entry.peak_bytes = max(reply.peak_bytes, racer.entry.peak_bytes or 0)


def _still_in(racers: Sequence[Racer]) -> Iterator[Racer]:
    return (racer for racer in racers if racer.entry.verdict == AGREES)


@contextmanager
def _out_on_failure(entry: Entry) -> Iterator[None]:
    try:
        yield
    except RacerError as error:
        entry.verdict, entry.problem = FAILED, str(error)
    except DisagreementError as error:
        entry.verdict, entry.problem = DIVERGES, str(error)


def _run(racer: Racer, verify: Verify) -> Reply:
    time.sleep(PAUSE)
    reply = racer.ask("run")
    if racer.entry.has_result:
        racer.entry.near_ties = verify(reply.answer, lambda: racer.ask("show").answer) or racer.entry.near_ties
    return reply


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def _work(participant: Participant, pipe: Connection, log: Path) -> None:
    """Answer calls until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    with log.open("w") as file:  # whatever a framework prints stays off the terminal
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        forget_peak()
        start, processor_start = time.perf_counter(), time.process_time()
        reply: Reply | str
        try:
            answer = getattr(participant, method)(*arguments)
            taken = time.perf_counter() - start, time.process_time() - processor_start
            memory = peak_bytes(), held_bytes()
            reply = Reply(participant.result(answer) if method == "run" else answer, *taken, *memory)
        except Exception as error:  # the parent's to report
            reply = f"{type(error).__name__}: {error}"
        pipe.send(reply)
