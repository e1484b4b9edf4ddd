"""One process per port: they do not disturb one another, and a crash of one is a finding about that one.

A process may be run by another interpreter, in an environment that has what the port needs: Python 3.11 or later, NumPy
2, ml-dtypes and safetensors, beside the port and its framework. This package need not be installed there.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue

from transformer_parity.check.one_port import Cases, Job, Message, title
from transformer_parity.compare.findings import Finding, Setting, failure
from transformer_parity.diagnose.investigate import FailureReport
from transformer_parity.diagnose.weight_audit import Fate
from transformer_parity.ports.compile_clock import Spent
from transformer_parity.system import start
from transformer_parity.system.child import PATIENCE, THREAD_SWITCHES


@dataclass
class Outcome:
    """All that the workers said."""

    environment: dict[str, dict[str, str]]
    findings: list[Finding] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # by which findings call what was asked for
    audits: dict[str, tuple[Fate, ...]] = field(default_factory=dict)
    failure_reports: list[FailureReport] = field(default_factory=list)
    spent: dict[str, Spent] = field(default_factory=dict)


def keep(message: Message, outcome: Outcome) -> None:
    """Keep what a worker said; of two ports of the same name, the second is called as it was asked for."""
    if message.name:
        taken = {name for asked, name in outcome.names.items() if asked != message.backend}
        outcome.names[message.backend] = message.backend if message.name in taken else message.name
    name = outcome.names.get(message.backend, message.backend.rpartition(":")[2])
    outcome.findings += [replace(finding, backend=name) for finding in message.findings]
    if message.audit:
        outcome.audits[name] = message.audit
    if message.failure_report is not None:
        outcome.failure_reports.append(message.failure_report.of(name))
    if message.environment:
        outcome.environment[name] = message.environment
    if message.spent:
        outcome.spent[name] = message.spent


WORK = "transformer_parity.check.one_port:work"  # what a process runs
SLOWEST_FIRST = ("jax", "tf", "torch", "numpy")  # to compile, on all cases


SILENCE = 600.0  # seconds without a word, after which a process is ended


_Said = Queue["tuple[_Worker, Message | None]"]  # None: that was all


def run_all(
    backends: Sequence[str],
    cases: Cases | Mapping[str, Cases],
    setting: Setting,
    *,
    interpreters: Mapping[str, str] | None = None,
    timeout: float | None = SILENCE,
    failures: Path | None = None,
    attention: bool = False,
) -> Iterator[Message]:
    """Compare all backends, as many at a time as there are cores, and yield what they say.

    Closing the iterator stops the workers.

    Args:
        backends: Names of ``PORTS``, and plug-in ports: ``module:class``, or the name of an entry point.
        cases: What to compare, or a mapping from each backend to that. A function, such as ``port_cases``, is called
            with the port in its process, where alone its conventions are known; it has to be picklable.
        setting: Dtypes, device and precision.
        interpreters: The Python interpreter that runs a backend, where it is not this one.
        timeout: Seconds without a word after which a worker is ended; None waits for ever.
        failures: Where to save what a guilty block was given; None saves nothing.
        attention: Whether the attention of a port that agrees is wanted too.
    """
    cores = os.cpu_count() or 1
    at_once = max(1, min(len(backends), cores))
    threads = dict.fromkeys(THREAD_SWITCHES, str(max(1, cores // at_once)))
    environment = {**threads, **os.environ}  # read by the frameworks when a worker imports them
    waiting = sorted(backends, key=lambda name: SLOWEST_FIRST.index(name) if name in SLOWEST_FIRST else -1)
    running: list[_Worker] = []
    said: _Said = Queue()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    name = waiting.pop(0)
                    chosen = cases[name] if isinstance(cases, Mapping) else cases
                    job = Job(name, chosen, setting, failures, attention)
                    python = (interpreters or {}).get(name, sys.executable)
                    try:
                        running.append(_Worker(job, python, environment, Path(folder), said))
                    except OSError as error:
                        problem = f"the interpreter {python} cannot be started: {error.strerror}"
                        yield Message(name, (failure(title(name), problem),), done=True)
                for worker, message in _listen(running, said, timeout):
                    yield message
                    if message.done:
                        running.remove(worker)
                        worker.stop()
        finally:
            for worker in running:
                worker.process.terminate()
            for worker in running:
                worker.stop()


class _Worker:
    """A process, and a thread that listens to it: one each, so that a death in mid-sentence disturbs nobody else."""

    def __init__(
        self,
        job: Job,
        python: str,
        environment: Mapping[str, str],
        folder: Path,
        said: _Said,
    ) -> None:
        self.backend = job.backend
        self.name = title(job.backend)
        self.doing = "starting"
        self.heard = time.monotonic()
        descriptor, path = tempfile.mkstemp(dir=folder)
        self.log = Path(path)
        content = pickle.dumps(job)
        with os.fdopen(descriptor, "wb") as log:  # whatever a framework prints stays off the terminal
            self.process = subprocess.Popen(
                [python, "-u", start.__file__, WORK],  # -u: what is printed is kept even by a process that crashes
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        threading.Thread(target=self._converse, args=(content, said), daemon=True).start()

    def _converse(self, job: bytes, said: _Said) -> None:
        """Hand over the job, and pass on what is said until the process ends."""
        if self.process.stdin is None or self.process.stdout is None:
            raise ValueError("the process has no pipes")
        with self.process.stdout as replies:
            with suppress(OSError), self.process.stdin as stream:  # of a dead process: there will be no replies
                stream.write(job)
            with suppress(EOFError, OSError, pickle.UnpicklingError):
                while True:
                    message: Message = pickle.load(replies)
                    self.heard = time.monotonic()
                    self.doing, self.name = message.doing or self.doing, message.name or self.name
                    said.put((self, message))
        said.put((self, None))

    def death(self) -> str:
        """Say how the process ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        code = self.process.returncode
        by_signal = code is not None and -code in {known.value for known in signal.Signals}
        name = f" ({signal.Signals(-code).name})" if by_signal else ""
        return f"the process ended with exit code {code}{name}"

    def last_message(self, problem: str) -> Message:
        """Return the finding that the process cannot make itself, with the last line that it printed."""
        problem = f"{problem} at {self.doing}"
        last = self.log.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["it printed nothing"]
        return Message(self.backend, (failure(self.name, f"{problem}: {last[0]}"),), done=True)

    def stop(self) -> None:
        """Wait a while for the process to end, then end it: frameworks have been seen to hang at exit."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        self.process.kill()
        self.process.wait()


def _listen(running: Sequence[_Worker], said: _Said, timeout: float | None) -> Iterator[tuple[_Worker, Message]]:
    """Yield the next thing that is said, or end those that have said nothing for too long."""
    if not running:
        return
    left = None if timeout is None else min(worker.heard for worker in running) + timeout - time.monotonic()
    try:
        worker, message = said.get(timeout=None if left is None else max(0.0, left))
    except Empty:
        for worker in [worker for worker in running if worker.heard + (timeout or 0.0) <= time.monotonic()]:
            worker.process.kill()
            yield worker, worker.last_message(f"no answer for {timeout:g} s")
        return
    if worker in running:  # and not the last gasp of one that has been ended
        yield worker, message or worker.last_message(worker.death())
