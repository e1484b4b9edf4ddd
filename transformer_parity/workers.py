"""One process per port: they do not disturb one another, and a crash of one is a finding about that one.

A process may be run by another interpreter, in an environment that has what the port needs: Python 3.11 or later, NumPy
2, ml-dtypes and safetensors, beside the port and its framework. This package need not be installed there.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from transformer_parity import start_worker
from transformer_parity.audit import Fate, as_mistake, audit
from transformer_parity.cases import ACTIVATIONS, RUNGS, Case, port_deck
from transformer_parity.clock import COMPILING, Spent, listen_to_jax
from transformer_parity.compare import AGREES, FAILED, SKIPPED, Finding, Kept, Setting, compare
from transformer_parity.errors import described
from transformer_parity.investigate import Inquiry, investigate, look
from transformer_parity.plugin import PluginPort
from transformer_parity.ports import PORTS

SLOWEST_FIRST = ("jax", "tf", "torch", "numpy")  # to compile, on the whole deck
PATIENCE = 10.0  # seconds for a process to end by itself
SILENCE = 600.0  # seconds without a word, after which a process is ended
THREAD_SWITCHES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "PJRT_NPROC",  # XLA's, behind JAX
)

Cases = Sequence[Case] | Callable[[Any], Sequence[Case]]  # or what returns them for a port, in the port's process


@dataclass(frozen=True)
class Message:
    """What a worker says: findings made, and what it does next."""

    backend: str  # as it was asked for
    findings: tuple[Finding, ...] = ()
    doing: str = ""
    environment: dict[str, str] | None = None
    done: bool = False
    audit: tuple[Fate, ...] = ()
    inquiry: Inquiry | None = None
    name: str = ""  # by which findings call it: said once, when it is imported
    steps: int = 0  # how many cases times dtypes there are: likewise
    spent: Spent | None = None  # said at the end


_Said = Queue["tuple[_Worker, Message | None]"]  # None: that was all


@dataclass(frozen=True)
class _Job:
    backend: str
    cases: Cases
    setting: Setting
    failures: Path | None
    attention: bool


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
                    job = _Job(name, chosen, setting, failures, attention)
                    python = (interpreters or {}).get(name, sys.executable)
                    try:
                        running.append(_Worker(job, python, environment, Path(folder), said))
                    except OSError as error:
                        problem = f"the interpreter {python} cannot be started: {error.strerror}"
                        yield Message(name, (failure(_title(name), problem),), done=True)
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


def port_cases(port: PluginPort, rungs: Sequence[str] = RUNGS) -> list[Case]:
    """Return what a port with conventions of its own is compared on."""
    return [case for case in port_deck(port.config()) if case.rung in rungs]


def failure(backend: str, problem: str) -> Finding:
    """Return the finding that a port could not be compared at all, or not to the end."""
    return Finding(backend, "", "process", "", "run", "", math.inf, 0.0, FAILED, problem)


class _Worker:
    """A process, and a thread that listens to it: one each, so that a death in mid-sentence disturbs nobody else."""

    def __init__(
        self,
        job: _Job,
        python: str,
        environment: Mapping[str, str],
        folder: Path,
        said: _Said,
    ) -> None:
        self.backend = job.backend
        self.name = _title(job.backend)
        self.doing = "starting"
        self.heard = time.monotonic()
        descriptor, path = tempfile.mkstemp(dir=folder)
        self.log = Path(path)
        content = pickle.dumps(job)
        with os.fdopen(descriptor, "wb") as log:  # whatever a framework prints stays off the terminal
            self.process = subprocess.Popen(
                [python, "-u", start_worker.__file__],  # -u: what is printed is kept even by a process that crashes
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


def _title(backend: str) -> str:
    """Return what to call a port that could not be asked for its name."""
    return backend.rpartition(":")[2]


def work() -> None:
    """Do the job that comes through standard input, and speak through what was standard output."""
    started = time.monotonic()
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the port prints goes where its errors go
    job: _Job = pickle.load(sys.stdin.buffer)
    made: list[Finding] = []
    name, doing = _title(job.backend), "importing"
    describe: Callable[[], dict[str, str]] = dict

    def tell(**what: Any) -> None:
        pickle.dump(Message(job.backend, tuple(made), **what), pipe)
        pipe.flush()
        made.clear()

    def report(what: str) -> None:
        nonlocal doing
        doing = what
        tell(doing=what)

    try:
        report(doing)
        port, describe = _import(job.backend)
        name = port.name
        if job.backend in PORTS:
            for dtype in job.setting.dtypes:
                port.import_package().runtime.check_placement(dtype, job.setting.device)
        cases = job.cases(port) if callable(job.cases) else job.cases
        steps = sum(len([dtype for dtype in job.setting.dtypes if dtype in case.dtypes]) for case in cases)
        tell(doing=doing, name=name, steps=steps)
        suspect = None
        main = next((case for case in cases if case.rung == ACTIVATIONS and not case.block), None)
        if main is not None and isinstance(port, PluginPort):
            dtype = next(dtype for dtype in (*job.setting.dtypes, *port.kind.dtypes) if dtype in port.kind.dtypes)
            report(f"{dtype} {main.name}")
            with suppress(Exception):  # what is wrong will show in the comparison, and be told there
                fates = audit(port, main, dtype, progress=report)
                suspect = as_mistake(fates)
                tell(doing=doing, audit=tuple(fates))
        found: list[Finding] = []
        kept: Kept = {}
        for finding in compare(cases, port, job.setting, report, kept):
            made.append(finding)
            found.append(finding)
        for inquiry in investigate(found, kept, cases, port, job.setting, job.backend, job.failures, report, suspect):
            tell(doing=doing, inquiry=inquiry)
        if job.attention and main is not None and all(f.verdict in (AGREES, SKIPPED) for f in found):
            tell(doing=doing, inquiry=look(main, port, job.setting))
    except SystemExit as error:
        made.append(failure(name, f"it called sys.exit({error.code!r}) at {doing}"))
    except Exception as error:
        made.append(failure(name, f"{described(error)} at {doing}"))
    spent = Spent(time.monotonic() - started, time.process_time(), COMPILING.seconds)
    tell(environment=describe(), done=True, spent=spent)


def _import(backend: str) -> tuple[Any, Callable[[], dict[str, str]]]:
    """Return a port, and what describes its environment."""
    port = PORTS[backend] if backend in PORTS else PluginPort(backend)
    describe = port.describe if isinstance(port, PluginPort) else port.import_package().describe
    if "jax" in sys.modules:
        listen_to_jax()
    return port, describe
