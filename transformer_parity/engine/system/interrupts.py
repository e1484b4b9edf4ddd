"""Handle Ctrl-C and SIGTERM."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # ten times faster than signal, which converts numbers to enums
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block. A second Ctrl-C interrupts the block immediately."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: _signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}  # omits ignored signals
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        handlers = {}
    for number in handlers:
        _signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
    for one in came:
        handlers[signal.Signals(one)](one, None)


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """Convert SIGTERM to KeyboardInterrupt, so that partial results are reported and temporary files are removed."""

    def handle(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
        raise KeyboardInterrupt

    is_main_thread = threading.current_thread() is threading.main_thread()  # only the main thread receives signals
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Stop:
    """A request to stop.

    Attributes:
        signal: The number of the signal that requested the stop; None if no signal has been received.
    """

    signal: int | None = None


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Record Ctrl-C and SIGTERM in a ``Stop``, so that a run can finish its current step before it stops.

    A second signal raises KeyboardInterrupt.
    """
    stop = Stop()

    def handle(number: int, frame: object) -> None:
        if stop.signal:
            raise KeyboardInterrupt
        stop.signal = number

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
