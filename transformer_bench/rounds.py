"""Processes for each participant, and interleaved rounds: in each, every participant runs once, while others wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformer_bench.measurements import DisagreementError, Entry
from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED
from transformer_parity.engine.processes.child import ChildEndedError
from transformer_parity.engine.processes.children import THREAD_SWITCHES, Children
from transformer_parity.engine.processes.messages import Broken, Parent
from transformer_parity.engine.processes.team import Team, TeamError
from transformer_parity.engine.system.machine import forget_peak, held_bytes, peak_bytes

SWITCHES = (*THREAD_SWITCHES, "VECLIB_MAXIMUM_THREADS")
WORK = "transformer_bench.rounds:work"  # what a process runs
PAUSE = 0.25  # seconds between two runs: threads that are out of work go on spinning for up to 0.2 (Intel's OpenMP)


class Participant:
    """What runs in a process. It is sent there before it has imported anything.

    Attributes:
        name: What it is called in tables.
        processes: How many processes do its work together; each has its threads in equal parts.
        has_result: Whether there is a result to agree about.
    """

    name: str
    processes: int = 1
    has_result: ClassVar[bool] = True
    _run: Callable[[], Any]  # what ``load`` makes ready

    def check_installed(self) -> None:
        """Raise MissingFrameworkError, with the install line, unless everything needed can be found."""

    def environments(self) -> AbstractContextManager[Sequence[Mapping[str, str]]]:
        """Return a block in which its processes run, which yields what each is to find in its environment."""
        return nullcontext([{}] * self.processes)

    def prepare(self) -> dict[str, str]:
        """Import what is needed, and return versions, devices and switches."""
        raise NotImplementedError

    def load(self, work: Any, weights: Path) -> None:
        """Get ready to do some work with a weight file."""
        raise NotImplementedError

    def run(self) -> Any:
        """Do the work: what is timed."""
        return self._run()

    def result(self, found: Any) -> Any:
        """Return what ``run`` found, in the form in which it is verified."""
        return found

    def show(self) -> Any:
        """Do it again, and return every step: where the result alone is not enough to verify it."""
        raise NotImplementedError(f"{self.name} does not show its steps, so a difference cannot be explained")


Verify = Callable[[Any, Callable[[], Any]], str]  # takes a result, and what shows its steps; returns its near-ties
Tell = Callable[[str, str], None]  # is told a participant's name and what it does now


@dataclass(frozen=True)
class Reply:
    """What a call in another process returned, and what it took; or in several that work together.

    Attributes:
        answer: What it returned.
        seconds: How long it took; of several processes, the slowest.
        processor_seconds: How long all its threads together kept processors busy.
        peak_bytes: The most memory that the process held during the call, or before it where the system cannot forget
            an earlier peak; of several, the one with the most.
        held_bytes: The memory that the process held afterwards, likewise.
        others: What it returned in the other processes.
    """

    answer: Any
    seconds: float
    processor_seconds: float
    peak_bytes: int | None = None
    held_bytes: int | None = None
    others: tuple[Any, ...] = ()

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> Reply:
        """Return the reply of processes that work together."""
        first, *others = replies
        return cls(
            first.answer,
            max(reply.seconds for reply in replies),
            sum(reply.processor_seconds for reply in replies),
            max((reply.peak_bytes for reply in replies if reply.peak_bytes is not None), default=None),
            max((reply.held_bytes for reply in replies if reply.held_bytes is not None), default=None),
            tuple(reply.answer for reply in others),
        )


class ParticipantError(Exception):
    """A call in another process failed, or the process ended; the message says how."""


class ParticipantProcess:
    """A participant in a process of its own, or in several.

    Attributes:
        entry: Where its measurements are kept.
    """

    def __init__(self, entry: Entry, team: Team) -> None:
        self.entry = entry
        self._team = team

    def ask(self, method: str, *arguments: Any) -> Reply:
        """Call a method of the participant and wait for its reply."""
        self.send(method, *arguments)
        return self.receive(method)

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the participant, whose reply has to be received later."""
        self._team.send((method, arguments))

    def receive(self, method: str) -> Reply:
        """Wait for the reply to a call.

        Raises:
            ParticipantError: The call raised an error, or a process has ended; now all have.
        """
        try:
            return Reply.of(self._team.replies())
        except TeamError as error:
            cause = error.cause
            why = f"{cause.how} in {method}: {cause.last_line}" if isinstance(cause, ChildEndedError) else cause.why
            raise ParticipantError(why if len(self._team) == 1 else f"{error.where}: {why}") from error


@contextmanager
def started(
    participants: Sequence[Participant], entries: Sequence[Entry], threads: int
) -> Iterator[tuple[list[ParticipantProcess], Path]]:
    """Start the processes of each participant, all importing at the same time; they end with the block.

    Yields:
        The processes, and a folder that is removed after the block.
    """
    with ExitStack() as stack:
        children = stack.enter_context(Children())
        processes = []
        for participant, entry in zip(participants, entries, strict=True):
            # Read when NumPy or a framework is imported.
            switches = dict.fromkeys(SWITCHES, str(max(1, threads // participant.processes)))
            told = stack.enter_context(participant.environments())
            members = [children.start(WORK, environment={**switches, **variables}) for variables in told]
            for member in members:
                member.send(participant)
            processes.append(ParticipantProcess(entry, Team(children, members)))
        for process in processes:
            process.send("prepare")
        yield processes, children.folder


def run_rounds(
    processes: Sequence[ParticipantProcess], work: Any, weights: Path, rounds: int, verify: Verify, tell: Tell
) -> None:
    """Load and warm up all participants, one after another, then run them in interleaved rounds.

    Each entry keeps its measurements, so that an interruption loses the current run only. A participant that fails or
    returns a wrong result takes no further part.

    Args:
        processes: The participants; ``prepare`` has been called.
        work: What each of them does.
        weights: The weight file.
        rounds: How often each of them runs.
        verify: Raises DisagreementError if a result is wrong.
        tell: Told what is about to happen.
    """
    for process in processes:
        tell(process.entry.name, "importing")
        with _out_on_failure(process.entry):
            process.entry.environment = process.receive("prepare").answer
    for process in _still_in(processes):
        with _out_on_failure(process.entry):
            tell(process.entry.name, "loading")
            process.entry.loaded_bytes = process.ask("load", work, weights).held_bytes
            tell(process.entry.name, "first call")
            process.entry.first_seconds = _run(process, verify).seconds
            tell(process.entry.name, "warming up")
            _run(process, verify)
    for number in range(rounds):
        shift = number % len(processes)
        for process in _still_in([*processes[shift:], *processes[:shift]]):
            tell(process.entry.name, f"round {number + 1} of {rounds}")
            with _out_on_failure(process.entry):
                process.entry.add(_run(process, verify))


def _still_in(processes: Sequence[ParticipantProcess]) -> Iterator[ParticipantProcess]:
    return (process for process in processes if process.entry.verdict == AGREES)


@contextmanager
def _out_on_failure(entry: Entry) -> Iterator[None]:
    try:
        yield
    except ParticipantError as error:
        entry.verdict, entry.problem = FAILED, str(error)
    except DisagreementError as error:
        entry.verdict, entry.problem = DIVERGES, str(error)


def _run(process: ParticipantProcess, verify: Verify) -> Reply:
    time.sleep(PAUSE)
    reply = process.ask("run")
    if process.entry.has_result:
        for answer in (reply.answer, *reply.others):
            near_ties = verify(answer, lambda: process.ask("show").answer)
            process.entry.near_ties = near_ties or process.entry.near_ties
    return reply


def work(parent: Parent) -> None:
    """Receive a participant and answer calls of its methods until there are no more."""
    participant: Participant = parent.receive()
    while True:
        try:
            method, arguments = parent.receive()
        except EOFError:
            return
        forget_peak()
        start, processor_start = time.perf_counter(), time.process_time()
        reply: Reply | Broken
        try:
            answer = getattr(participant, method)(*arguments)
            taken = time.perf_counter() - start, time.process_time() - processor_start
            memory = peak_bytes(), held_bytes()
            reply = Reply(participant.result(answer) if method == "run" else answer, *taken, *memory)
        except Exception as error:  # the parent's to report
            reply = Broken(f"{type(error).__name__}: {error}")
        parent.send(reply)
