"""Start a child process, exchange messages with it, and stop it.

The process runs a ``module:function`` of this project, in the same Python interpreter as the parent or in a different
interpreter. The process is the leader of a session, so that all of its descendants can also be stopped.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread
from typing import IO, Any

from transformer_parity.engine.processes import messages, orphans
from transformer_parity.engine.processes.silence import Silence
from transformer_parity.engine.system.errors import printable

PATIENCE = 10.0  # seconds to wait for a process to exit by itself
GRACE = 0.5  # seconds within which the descendants of an exited process must remove shared resources and exit
# Seconds to wait for more messages after a process has exited. Other processes may keep the exited process's pipe open,
# and reading from it can be slow on a busy machine.
READ = 5.0
MOST_UNREAD = 16  # maximum number of unread messages per child, to limit memory use; a child with more messages waits
PIPE = 2**20  # size of the pipe in bytes: 16 times the default, and the maximum on Linux without privileges
WAKE = 0.5  # timeout of each wait in seconds; on Windows, Ctrl-C doesn't interrupt a wait without a timeout


def _widen(pipe: Any) -> None:
    """Increase the size of a pipe's buffer, which halves the time needed to read hundreds of megabytes."""
    # Only Linux supports this call, and it raises an error if the user's pipes would exceed a limit.
    with suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE)


class ChildEndedError(Exception):
    """A child process has exited or was stopped.

    Attributes:
        how: A description of the exit, such as the exit code.
        last_line: The last line that the process printed, which may contain the reason.
    """

    def __init__(self, how: str, last_line: str) -> None:
        super().__init__(f"{how}: {last_line}")
        self.how, self.last_line = how, last_line


class StartError(OSError):
    """A Python interpreter can't be started."""


class Child:
    """A child process, with three threads that write to it, read from it, and wait for its exit.

    Attributes:
        process: The process.
        silence: The time since the last message from the process.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path, news: Condition) -> None:
        self._log, self._news = log, news
        with log.open("wb") as file:  # the messages that frameworks print go to a file rather than the terminal
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        _widen(self.process.stdout)
        self.silence = Silence(self.process.pid)
        self._received: deque[Any] = deque()
        self._number = 0  # number of messages received so far
        self._is_stopped = False
        self._unreadable = ""  # the reason why a message from the process can't be read
        self._to_send: SimpleQueue[bytes] = SimpleQueue()
        self._has_ended = False
        reader = Thread(target=self._read, daemon=True)
        for thread in (reader, Thread(target=self._write, daemon=True)):
            thread.start()
        Thread(target=self._wait, args=(reader,), daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message. If the process has exited, the message is lost."""
        self._to_send.put(b"".join(messages.parts(message)))

    @property
    def has_news(self) -> bool:
        """True if ``receive`` returns immediately, because a message is available or the process has exited."""
        return bool(self._received) or self._has_ended

    def receive(self) -> Any:
        """Return the next message, waiting for it if necessary.

        Raises:
            ChildEndedError: If the process has exited without sending another message.
        """
        with self._news:
            while not self.has_news:
                self._news.wait(WAKE)
            if self._received:
                self._news.notify_all()
                return self._received.popleft()
        raise ChildEndedError(self._how_it_ended(), self.last_line())

    def last_line(self) -> str:
        """Return the last line that the process has printed."""
        return [*self._log.read_text("utf-8", "replace").strip().splitlines()[-1:], "the process printed nothing"][0]

    def stop(self, patience: float = 0.0) -> None:
        """Wait up to ``patience`` seconds for the process to exit, then kill it and all of its descendants."""
        with self._news:
            self._is_stopped = True
            self._news.notify_all()
            self._news.wait_for(lambda: self._has_ended, patience)
            self.process.kill()
            self._news.wait_for(lambda: self._has_ended, PATIENCE)

    def _how_it_ended(self) -> str:
        if self._unreadable:
            return self._unreadable
        code = self.process.returncode
        by_signal = code is not None and -code in {known.value for known in signal.Signals}
        name = f" ({signal.Signals(-code).name})" if by_signal else ""
        return f"the process ended with exit code {code}{name}"

    def _write(self) -> None:
        if (stream := self.process.stdin) is None:
            raise ValueError("the process has no standard input")
        with suppress(OSError), stream:  # the process may exit before it has read everything
            while content := self._to_send.get():
                stream.write(content)
                stream.flush()

    def _read(self) -> None:
        if (stream := self.process.stdout) is None:
            raise ValueError("the process has no standard output")
        with suppress(OSError, EOFError), stream:
            self._skip_to_start(stream)
            while True:
                message = self._understood(stream)
                self.silence.heard()
                with self._news:
                    self._received.append(message)
                    self._number += 1
                    self._news.notify_all()
                    self._news.wait_for(self._has_capacity)

    def _skip_to_start(self, stream: IO[bytes]) -> None:
        """Skip the text that a wrapper around the interpreter may print before the first message."""
        try:
            messages.skip_to_start(stream)
        except messages.NoStartError as error:
            where = (
                "standard output, which is reserved for messages; print to standard error in the wrapper of the "
                "interpreter instead"
            )
            self._unreadable = f"the process printed {printable(str(error))!r} to {where}"
            self.process.kill()
            raise EOFError("nothing more is read") from error

    def _understood(self, stream: IO[bytes]) -> Any:
        """Return the next message. If other code has written to the pipe, its text is read as the sizes of arrays."""
        try:
            content = messages.receive_parts(stream)
        except (MemoryError, OverflowError) as error:
            self._unreadable = "the process wrote to a pipe that is reserved for messages"
            self.process.kill()
            raise EOFError("nothing more is read") from error
        try:
            return messages.unpickled(content)
        except (Exception, SystemExit) as error:  # unpickling may import a module, which may raise any exception
            self._unreadable = f"the process sent a message that cannot be unpickled: {type(error).__name__}: {error}"
            self.process.kill()
            raise EOFError("nothing more is read") from error

    def _has_capacity(self) -> bool:
        return len(self._received) < MOST_UNREAD or self._is_stopped

    def _wait(self, reader: Thread) -> None:
        """Wait for the exit of the process, not for the end of its pipes, because descendants may keep them open."""
        self.process.wait()
        deadline = time.monotonic() + GRACE
        while orphans.members(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        orphans.end_all(self.process.pid)
        before = -1
        # The reader stops at the end of the pipe, unless a process of a different session keeps the pipe open.
        while reader.is_alive() and before < self._number:
            with self._news:
                self._news.wait_for(self._has_capacity)
                before = self._number
            reader.join(READ)
        self._to_send.put(b"")  # stops the writer
        with self._news:
            self._has_ended = True
            self._news.notify_all()
