"""Start the processes of all implementations, and run interleaved rounds.

In each round, every implementation runs once while all other implementations wait.
"""

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
WORK = "transformer_bench.rounds:work"  # the function that each process runs
PAUSE = 0.25  # seconds between two runs, because idle threads of Intel's OpenMP keep spinning for up to 0.2 seconds


class TimedImplementation:
    """An implementation to time. The object is sent to child processes, in which it imports the required packages.

    Attributes:
        name: The name shown in tables.
        processes: The number of processes of the implementation. The threads are divided equally among the processes.
        has_result: Whether the implementation returns a result to verify.
    """

    name: str
    processes: int = 1
    has_result: ClassVar[bool] = True
    _run: Callable[[], Any]  # set by ``load``

    def check_installed(self) -> None:
        """Raise a MissingFrameworkError with the install command if a required package isn't installed."""

    def environments(self) -> AbstractContextManager[Sequence[Mapping[str, str]]]:
        """Return a context manager that yields the environment variables of each process.

        The processes run inside this context.
        """
        return nullcontext([{}] * self.processes)

    def prepare(self) -> dict[str, str]:
        """Import the required packages, and return the versions, devices, and settings."""
        raise NotImplementedError

    def load(self, work: Any, weights: Path) -> None:
        """Load a weight file, and prepare to run the given workload."""
        raise NotImplementedError

    def run(self) -> Any:
        """Run the workload. This call is timed."""
        return self._run()

    def result(self, found: Any) -> Any:
        """Convert the return value of ``run`` to the form that the verifier requires."""
        return found

    def show(self) -> Any:
        """Rerun the workload and return every step.

        This method is called if the workload's result isn't sufficient to explain a difference.
        """
        raise NotImplementedError(
            f"{self.name} does not report the steps of its search, so a difference cannot be explained"
        )


# Function that verifies a result and returns a description of the near-ties. Its parameters are the result and a
# function that returns the search steps.
Verify = Callable[[Any, Callable[[], Any]], str]
Tell = Callable[[str, str], None]  # function that takes the name of an implementation and its current activity


@dataclass(frozen=True)
class Reply:
    """The return value and the costs of a call in one process, or in multiple processes that work together.

    Attributes:
        answer: The return value.
        seconds: The duration of the call in seconds. If there are multiple processes, this is the longest duration.
        processor_seconds: The CPU time in seconds, summed over all threads and processes.
        peak_bytes: The peak memory during the call, or since the start of the process if the system can't reset the
            peak. If there are multiple processes, this is the largest of their peaks. None if unknown.
        held_bytes: The memory of the process after the call. If there are multiple processes, this is the largest of
            their values. None if unknown.
        others: The return values in the other processes.
    """

    answer: Any
    seconds: float
    processor_seconds: float
    peak_bytes: int | None = None
    held_bytes: int | None = None
    others: tuple[Any, ...] = ()

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> Reply:
        """Combine the replies of processes that work together."""
        first, *others = replies
        return cls(
            first.answer,
            max(reply.seconds for reply in replies),
            sum(reply.processor_seconds for reply in replies),
            max((reply.peak_bytes for reply in replies if reply.peak_bytes is not None), default=None),
            max((reply.held_bytes for reply in replies if reply.held_bytes is not None), default=None),
            tuple(reply.answer for reply in others),
        )


class ImplementationError(Exception):
    """A call in a child process failed, or the process exited. The message describes the failure."""


class ImplementationProcess:
    """An implementation in one or more separate processes.

    Attributes:
        entry: The entry that stores the measurements of the implementation.
    """

    def __init__(self, entry: Entry, team: Team) -> None:
        self.entry = entry
        self._team = team

    def ask(self, method: str, *arguments: Any) -> Reply:
        """Call a method of the implementation and wait for the reply."""
        self.send(method, *arguments)
        return self.receive(method)

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the implementation. Use ``receive`` to get the reply."""
        self._team.send((method, arguments))

    def receive(self, method: str) -> Reply:
        """Wait for the reply to a call.

        Raises:
            ImplementationError: If the call raised an exception or a process exited. In this case, all processes of
                the implementation have already been stopped.
        """
        try:
            return Reply.of(self._team.replies())
        except TeamError as error:
            cause = error.cause
            why = f"{cause.how} in {method}: {cause.last_line}" if isinstance(cause, ChildEndedError) else cause.why
            raise ImplementationError(why if len(self._team) == 1 else f"{error.where}: {why}") from error


@contextmanager
def started(
    implementations: Sequence[TimedImplementation], entries: Sequence[Entry], threads: int
) -> Iterator[tuple[list[ImplementationProcess], Path]]:
    """Start the processes of all implementations, which import their packages in parallel.

    At the end of the block, the processes are stopped.

    Yields:
        The processes, and a temporary directory that is removed at the end of the block.
    """
    with ExitStack() as stack:
        children = stack.enter_context(Children())
        processes = []
        for implementation, entry in zip(implementations, entries, strict=True):
            # NumPy and the frameworks read these variables when they are imported.
            switches = dict.fromkeys(SWITCHES, str(max(1, threads // implementation.processes)))
            told = stack.enter_context(implementation.environments())
            members = [children.start(WORK, environment={**switches, **variables}) for variables in told]
            for member in members:
                member.send(implementation)
            processes.append(ImplementationProcess(entry, Team(children, members)))
        for process in processes:
            process.send("prepare")
        yield processes, children.directory


def run_rounds(
    processes: Sequence[ImplementationProcess], work: Any, weights: Path, rounds: int, verify: Verify, tell: Tell
) -> None:
    """Load and warm up all implementations, one after another, then run them in interleaved rounds.

    Measurements are stored immediately, so an interruption loses only the current measurement. An implementation that
    fails or returns an incorrect result is excluded from later rounds.

    Args:
        processes: The implementations, whose ``prepare`` method has been called.
        work: The workload to run.
        weights: The weight file.
        rounds: The number of rounds.
        verify: A function that raises a DisagreementError if a result is wrong.
        tell: A function that is called whenever an implementation is about to start an activity, such as loading. Its
            arguments are the name of the implementation and the activity.
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


def _still_in(processes: Sequence[ImplementationProcess]) -> Iterator[ImplementationProcess]:
    return (process for process in processes if process.entry.verdict == AGREES)


@contextmanager
def _out_on_failure(entry: Entry) -> Iterator[None]:
    try:
        yield
    except ImplementationError as error:
        entry.verdict, entry.problem = FAILED, str(error)
    except DisagreementError as error:
        entry.verdict, entry.problem = DIVERGES, str(error)


def _run(process: ImplementationProcess, verify: Verify) -> Reply:
    time.sleep(PAUSE)
    reply = process.ask("run")
    if process.entry.has_result:
        for answer in (reply.answer, *reply.others):
            near_ties = verify(answer, lambda: process.ask("show").answer)
            process.entry.near_ties = near_ties or process.entry.near_ties
    return reply


def work(parent: Parent) -> None:
    """Receive an implementation, and call its methods on request until the parent closes the connection."""
    implementation: TimedImplementation = parent.receive()
    while True:
        try:
            method, arguments = parent.receive()
        except EOFError:
            return
        forget_peak()
        start, processor_start = time.perf_counter(), time.process_time()
        reply: Reply | Broken
        try:
            answer = getattr(implementation, method)(*arguments)
            taken = time.perf_counter() - start, time.process_time() - processor_start
            memory = peak_bytes(), held_bytes()
            reply = Reply(implementation.result(answer) if method == "run" else answer, *taken, *memory)
        except Exception as error:  # the parent process reports the error
            reply = Broken(f"{type(error).__name__}: {error}")
        parent.send(reply)
