"""One process per port: they do not disturb one another, and a crash of one is a finding about that one."""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from transformer_parity.cases import Case
from transformer_parity.compare import FAILED, Finding, Setting, compare
from transformer_parity.ports import PORTS

SLOWEST_FIRST = ("jax", "tf", "torch", "numpy")  # to compile, on the whole deck
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
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    cores = os.cpu_count() or 1
    at_once = max(1, min(len(backends), cores))
    for switch in THREAD_SWITCHES:  # read by the frameworks when a worker imports them
        os.environ.setdefault(switch, str(max(1, cores // at_once)))
    waiting = sorted(backends, key=SLOWEST_FIRST.index)
    running: dict[str, tuple[SpawnProcess, Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    backend = waiting.pop(0)
                    log = Path(folder) / f"{backend}.log"
                    process = context.Process(target=_work, args=(backend, cases, setting, messages, log), daemon=True)
                    process.start()
                    running[backend] = process, log
                for message in _receive(messages, running):
                    yield message
                    if message.done:
                        running.pop(message.backend)[0].join()
        finally:
            for process, _ in running.values():
                process.terminate()


def _receive(messages: Any, running: dict[str, tuple[SpawnProcess, Path]]) -> Iterator[Message]:
    """Yield the next message, or say which worker died without a word."""
    try:
        yield messages.get(timeout=0.5)
    except queue.Empty:
        for backend, (process, log) in list(running.items()):
            if process.exitcode is not None:
                last = log.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["no output"]
                problem = f"the process ended with exit code {process.exitcode}: {last[0]}"
                yield Message(backend, (_failed(backend, problem),), done=True)


def _failed(backend: str, problem: str) -> Finding:
    return Finding(backend, "", "process", "", "run", "", math.inf, 0.0, FAILED, problem)


def _work(backend: str, cases: Sequence[Case], setting: Setting, messages: Any, log: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    with log.open("w") as file:  # whatever a framework prints stays off the terminal
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    messages.put(Message(backend, doing="importing"))
    package = PORTS[backend].import_package()
    try:
        for dtype in setting.dtypes:
            package.runtime.check_placement(dtype, setting.device)
    except (RuntimeError, ValueError) as error:
        messages.put(Message(backend, (_failed(backend, str(error)),), environment=package.describe(), done=True))
        return
    made: list[Finding] = []

    def report(doing: str) -> None:
        messages.put(Message(backend, tuple(made), doing))
        made.clear()

    for finding in compare(cases, PORTS[backend], setting, report):
        made.append(finding)
    messages.put(Message(backend, tuple(made), environment=package.describe(), done=True))
