"""Start, supervise, and stop the child processes of a ``with`` block.

The processes are stopped at the end of the block, and also if this process is killed. ``Children.listen`` is the only
loop that supervises processes. It waits for messages, and it detects and stops processes that exit or are silent for
too long.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Condition
from typing import Any, Self

from transformer_parity.engine.processes import orphans, start
from transformer_parity.engine.processes.child import WAKE, Child, ChildEndedError, StartError

# Maximum seconds between two measurements of CPU time. The interval must be long enough for every process to get some
# CPU time on a busy machine.
LONGEST_INTERVAL = 5.0
PULSE = 0.2  # maximum seconds between two calls to the ``pulse`` function

THREAD_SWITCHES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "PJRT_NPROC",  # for XLA, which JAX uses
)


@contextmanager
def removed_afterwards(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Remove a directory at the end of the block or when this process exits, even if the process is killed.

    Yields:
        The process that waits for this process to exit and then removes the directory.
    """
    watch = subprocess.Popen(
        [sys.executable, "-P", orphans.__file__, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield watch
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        watch.communicate()


class Children:
    """The child processes of a ``with`` block and a temporary directory for them.

    At the end of the block, the processes are stopped and the directory is removed.

    Args:
        environment: The environment variables of the processes; None to inherit ``os.environ``.

    Attributes:
        directory: The temporary directory.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(os.environ if environment is None else environment)
        self._children: list[Child] = []
        self._news = Condition()

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="parity-"))
        self._logs = self.directory / "logs"
        self._logs.mkdir()
        self._block = ExitStack()
        self._watch = self._block.enter_context(removed_afterwards(self.directory))
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for child in self._children:
                child.process.kill()
            for child in self._children:
                self.stop(child)
        finally:
            self._block.close()

    def start(self, function: str, python: str = sys.executable, environment: Mapping[str, str] | None = None) -> Child:
        """Start a process.

        Args:
            function: The ``module:function`` to run. It is called with a ``messages.Parent``.
            python: The Python interpreter.
            environment: Additional environment variables for this process.

        Raises:
            StartError: If the interpreter can't be started.
        """
        command = [python, "-u", start.__file__, function]  # -u keeps the printed text even if the process crashes
        variables = {**self._environment, **(environment or {})}
        try:
            child = Child(command, variables, self._logs / str(len(self._children)), self._news)
        except OSError as error:
            raise StartError(f"the interpreter {python} cannot be started: {error.strerror}") from error
        self._children.append(child)
        self._tell(f"+{child.process.pid}\n")
        return child

    def stop(self, child: Child, patience: float = 0.0) -> None:
        """Wait up to ``patience`` seconds for a process to exit, then kill it and all of its descendants."""
        child.stop(patience)
        self._tell(f"-{child.process.pid}\n")

    def listen(
        self,
        members: Collection[Child],
        *,
        patience: float = math.inf,
        seconds: float = math.inf,
        pulse: Callable[[], None] | None = None,
    ) -> Iterator[tuple[Child, Any]]:
        """Yield (child, message) for every message, in order of arrival, until ``members`` is empty.

        The caller removes a child from ``members`` after its last message, and may also add children. If a child exits
        before its last message or is silent for too long, it is stopped, and its last message is a ``ChildEndedError``.

        Args:
            members: The children to listen to. The caller may change the collection after every message.
            patience: Number of seconds without a message after which a child is stopped. The time that the child
                spends waiting for a CPU core is excluded.
            seconds: The maximum total time to listen, in seconds.
            pulse: A function to call multiple times per second. If it raises an exception, the iteration ends.
        """
        deadline = time.monotonic() + seconds
        interval = min(patience / 10.0, LONGEST_INTERVAL)
        lost: set[Child] = set()
        while (waiting := [child for child in members if child not in lost]) and time.monotonic() < deadline:
            if pulse is not None:
                pulse()
            most = min(interval, deadline - time.monotonic(), math.inf if pulse is None else PULSE)
            news = self._with_news(waiting, most)
            for child in waiting:
                if child not in members:  # the caller has removed it in the meantime
                    continue
                if child in news:
                    message = self._next(child)
                elif patience < math.inf and child.silence.count(interval) >= patience:
                    message = ChildEndedError(f"no progress for {patience:g} s", child.last_line())
                else:
                    continue
                if isinstance(message, ChildEndedError):
                    lost.add(child)
                    self.stop(child)
                yield child, message

    def _with_news(self, among: Sequence[Child], seconds: float) -> list[Child]:
        """Wait up to ``seconds`` until any child has sent a message or exited, and return all such children."""
        deadline = time.monotonic() + seconds
        with self._news:
            while not (found := [child for child in among if child.has_news]) and time.monotonic() < deadline:
                self._news.wait(min(WAKE, max(0.0, deadline - time.monotonic())))
        return found

    def _next(self, child: Child) -> Any:
        try:
            return child.receive()
        except ChildEndedError as error:
            return error

    def _tell(self, line: str) -> None:
        """Notify the watching process that a child was started or has exited.

        The watching process kills all children that are still running after this process has exited.
        """
        if self._watch.stdin is None:
            raise ValueError("the process has no standard input")
        with suppress(OSError):
            self._watch.stdin.write(line.encode())
            self._watch.stdin.flush()
