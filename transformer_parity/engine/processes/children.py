"""The child processes of a block: how they are started, listened to and stopped.

They end with the block that started them and with this process, even if that is killed. ``Children.listen`` is the only
loop that supervises processes: it waits for messages, notices processes that end or are silent for too long, and stops
them.
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

LONGEST_INTERVAL = 5.0  # seconds between two looks at the processor time: a busy machine gives every process some
PULSE = 0.2  # seconds between two calls of what is called meanwhile

THREAD_SWITCHES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "PJRT_NPROC",  # XLA's, behind JAX
)


@contextmanager
def removed_afterwards(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Remove a folder after the block, or when this process ends, also if that is killed; yield what waits for that."""
    watch = subprocess.Popen(
        [sys.executable, "-P", orphans.__file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield watch
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        watch.communicate()


class Children:
    """The child processes of a block, and a folder for them; all are gone after it.

    Args:
        environment: What they find in ``os.environ``; None is what there is here.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(os.environ if environment is None else environment)
        self._children: list[Child] = []
        self._news = Condition()

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="parity-"))
        self._logs = self.folder / "logs"
        self._logs.mkdir()
        self._block = ExitStack()
        self._watch = self._block.enter_context(removed_afterwards(self.folder))
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
            function: What it runs, ``module:function``: called with its ``messages.Parent``.
            python: The interpreter.
            environment: What it finds in ``os.environ`` beside what all find.

        Raises:
            StartError: The interpreter cannot be started.
        """
        command = [python, "-u", start.__file__, function]  # -u: what is printed is kept even by a process that crashes
        variables = {**self._environment, **(environment or {})}
        try:
            child = Child(command, variables, self._logs / str(len(self._children)), self._news)
        except OSError as error:
            raise StartError(f"the interpreter {python} cannot be started: {error.strerror}") from error
        self._children.append(child)
        self._tell(f"+{child.process.pid}\n")
        return child

    def stop(self, child: Child, patience: float = 0.0) -> None:
        """Give a process some seconds to end, then end it and all that it has started."""
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
        """Yield every message of some children with its sender, as it comes, until there are no members.

        The caller removes a child from ``members`` after its last message, and may add another. A child that ends
        before that, or is silent for too long, is stopped; its last message is a ``ChildEndedError``.

        Args:
            members: The children to listen to; read again after every message.
            patience: Seconds of silence, without waits for a processor, after which a child is stopped.
            seconds: How long to listen in all.
            pulse: Called several times a second. An exception that it raises ends the iteration.
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
                if child not in members:  # the caller has removed it meanwhile
                    continue
                if child in news:
                    message = self._next(child)
                elif patience < math.inf and child.silence.count(interval) >= patience:
                    message = ChildEndedError(f"no answer for {patience:g} s", child.last_line())
                else:
                    continue
                if isinstance(message, ChildEndedError):
                    lost.add(child)
                    self.stop(child)
                yield child, message

    def _with_news(self, among: Sequence[Child], seconds: float) -> list[Child]:
        """Wait until a child has news, but at most so long, and return those that have."""
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
        """Say which children there are to the process that ends them when this one is gone."""
        if self._watch.stdin is None:
            raise ValueError("the process has no standard input")
        with suppress(OSError):
            self._watch.stdin.write(line.encode())
            self._watch.stdin.flush()
