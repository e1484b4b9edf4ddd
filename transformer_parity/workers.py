"""One process per port: they do not disturb one another, and a crash of one is a finding about that one."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from transformer_parity.cases import Case
from transformer_parity.compare import FAILED, Finding, Setting, compare
from transformer_parity.ports import PORTS

SLOWEST_FIRST = ("jax", "tf", "torch", "numpy")  # to compile, on the whole deck
PATIENCE = 10.0  # seconds for a process to end by itself
THREAD_SWITCHES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


@dataclass(frozen=True)
class Message:
    """What a worker says: findings made, and what it does next."""

    backend: str
    findings: tuple[Finding, ...] = ()
    doing: str = ""
    environment: dict[str, str] | None = None
    done: bool = False


def run_all(backends: Sequence[str], cases: Sequence[Case], setting: Setting) -> Iterator[Message]:
    """Compare all backends, as many at a time as there are cores, and yield what they say.

    Closing the iterator stops the workers.
    """
    cores = os.cpu_count() or 1
    at_once = max(1, min(len(backends), cores))
    for switch in THREAD_SWITCHES:  # read by the frameworks when a worker imports them
        os.environ.setdefault(switch, str(max(1, cores // at_once)))
    waiting = sorted(backends, key=SLOWEST_FIRST.index)
    running: list[_Worker] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(_Worker(waiting.pop(0), cases, setting, Path(folder)))
                ready = wait([worker.connection for worker in running])
                for worker in [worker for worker in running if worker.connection in ready]:
                    message = worker.receive()
                    yield message
                    if message.done:
                        worker.stop()
                        running.remove(worker)
        finally:
            for worker in running:
                worker.process.terminate()
            for worker in running:
                worker.stop()


class _Worker:
    """A process and the pipe it speaks through: one each, so that a death in mid-sentence disturbs nobody else."""

    def __init__(self, backend: str, cases: Sequence[Case], setting: Setting, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.backend = backend
        self.doing = "starting"
        self.log = folder / f"{backend}.log"
        self.log.touch()
        self.connection, other_end = context.Pipe(duplex=False)
        arguments = (backend, cases, setting, other_end, self.log)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        other_end.close()  # ours, so that the end of the process is the end of the pipe

    def receive(self) -> Message:
        """Return the next message, or say that the process died without a word."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            last = self.log.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["it printed nothing"]
            problem = f"the process ended with exit code {self.process.exitcode} at {self.doing}: {last[0]}"
            return Message(self.backend, (failure(self.backend, problem),), done=True)
        self.doing = message.doing or self.doing
        return message

    def stop(self) -> None:
        """Wait a while for the process to end, then end it: frameworks have been seen to hang at exit."""
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


def failure(backend: str, problem: str) -> Finding:
    """Return the finding that a port could not be compared at all, or not to the end."""
    return Finding(backend, "", "process", "", "run", "", math.inf, 0.0, FAILED, problem)


def _work(backend: str, cases: Sequence[Case], setting: Setting, pipe: Connection, log: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    with log.open("w") as file:  # whatever a framework prints stays off the terminal
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    pipe.send(Message(backend, doing="importing"))
    package = PORTS[backend].import_package()
    try:
        for dtype in setting.dtypes:
            package.runtime.check_placement(dtype, setting.device)
    except (RuntimeError, ValueError) as error:
        pipe.send(Message(backend, (failure(backend, str(error)),), environment=package.describe(), done=True))
        return
    made: list[Finding] = []

    def report(doing: str) -> None:
        pipe.send(Message(backend, tuple(made), doing))
        made.clear()

    for finding in compare(cases, PORTS[backend], setting, report):
        made.append(finding)
    pipe.send(Message(backend, tuple(made), environment=package.describe(), done=True))
