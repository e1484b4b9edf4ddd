"""A child process: how it is started, what is said to it and by it, and how it ends.

It runs ``module:function`` of ours, by this interpreter or another one, as the leader of a session: whatever it starts
ends with it.
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

PATIENCE = 10.0  # seconds for a process to end by itself
GRACE = 0.5  # seconds for what a process has started to end after it, and to remove what it shares
READ = (
    5.0  # seconds without a message after its end, when something else may hold its pipe: a busy machine reads slowly
)
MOST_UNREAD = 16  # messages of a child: then it waits until one is read, instead of filling the memory
PIPE = 2**20  # bytes, the most that Linux gives every user: 16 times as much as by default
WAKE = 0.5  # seconds: on Windows, a wait without an end is not interrupted by Ctrl-C


def _widen(pipe: Any) -> None:
    """Let a pipe take more before who writes has to wait: hundreds of megabytes are read in half the time."""
    with suppress(ImportError, AttributeError, OSError):  # of other systems, or the limit of a user
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE)


class ChildEndedError(Exception):
    """A child process has ended, or was ended; the last line that it printed may say why."""

    def __init__(self, how: str, last_line: str) -> None:
        super().__init__(f"{how}: {last_line}")
        self.how, self.last_line = how, last_line


class StartError(OSError):
    """An interpreter cannot be started."""


class Child:
    """A process, and three threads: one writes to it, one reads from it, one waits for its end.

    Attributes:
        process: The process.
        silence: How long it has been silent.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path, news: Condition) -> None:
        self._log, self._news = log, news
        with log.open("wb") as file:  # whatever a framework prints stays off the terminal
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
        self._number = 0  # of messages received
        self._is_stopped = False
        self._unreadable = ""  # why what it sent cannot be read
        self._to_send: SimpleQueue[bytes] = SimpleQueue()
        self._has_ended = False
        reader = Thread(target=self._read, daemon=True)
        for thread in (reader, Thread(target=self._write, daemon=True)):
            thread.start()
        Thread(target=self._wait, args=(reader,), daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message; one to a process that has ended is lost."""
        self._to_send.put(b"".join(messages.parts(message)))

    @property
    def has_news(self) -> bool:
        """Whether there is a message, or there will be no more."""
        return bool(self._received) or self._has_ended

    def receive(self) -> Any:
        """Return the next message, and wait for it if there is none.

        Raises:
            ChildEndedError: The process has ended without sending one.
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
        return [*self._log.read_text("utf-8", "replace").strip().splitlines()[-1:], "it printed nothing"][0]

    def stop(self, patience: float = 0.0) -> None:
        """Give the process some seconds to end, then end it and all that it has started."""
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
        with suppress(OSError), stream:  # of a dead process: nothing is read any more
            while content := self._to_send.get():
                stream.write(content)
                stream.flush()

    def _read(self) -> None:
        if (stream := self.process.stdout) is None:
            raise ValueError("the process has no standard output")
        with suppress(OSError, EOFError), stream:
            self._skip_to_start(stream)
            while True:
                message = self._understood(messages.receive_parts(stream))
                self.silence.heard()
                with self._news:
                    self._received.append(message)
                    self._number += 1
                    self._news.notify_all()
                    self._news.wait_for(self._has_room)

    def _skip_to_start(self, stream: IO[bytes]) -> None:
        """Read what a wrapper of the interpreter prints."""
        try:
            messages.skip_to_start(stream)
        except messages.NoStartError as error:
            where = "standard output, which must carry messages only: let its wrapper print to standard error"
            self._unreadable = f"it printed {printable(str(error))!r} to {where}"
            self.process.kill()
            raise EOFError("nothing more is read") from error

    def _understood(self, content: list[bytearray]) -> Any:
        try:
            return messages.unpickled(content)
        except (Exception, SystemExit) as error:  # a module that is imported for it may raise anything
            self._unreadable = f"it sent what cannot be read here: {type(error).__name__}: {error}"
            self.process.kill()
            raise EOFError("nothing more is read") from error

    def _has_room(self) -> bool:
        return len(self._received) < MOST_UNREAD or self._is_stopped

    def _wait(self, reader: Thread) -> None:
        """Wait for the process itself: its pipes stay open as long as something that it started holds them."""
        self.process.wait()
        deadline = time.monotonic() + GRACE
        while orphans.members(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        orphans.end_all(self.process.pid)
        before = -1
        while reader.is_alive() and before < self._number:  # all is read, unless another session holds the pipe
            with self._news:
                self._news.wait_for(self._has_room)
                before = self._number
            reader.join(READ)
        self._to_send.put(b"")  # ends the writer
        with self._news:
            self._has_ended = True
            self._news.notify_all()
