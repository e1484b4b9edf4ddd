"""Ctrl-C and SIGTERM."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal turns numbers into enums, which takes ten times as long
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until what has begun is whole; a second Ctrl-C does not wait."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: _signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}  # others wait for nothing
    if threading.current_thread() is not threading.main_thread():  # only the main thread is sent signals
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
    """Let SIGTERM end the block as Ctrl-C does: what was found is reported, and nothing is left behind."""

    def handle(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # the end is not interrupted by a second one
        raise KeyboardInterrupt

    is_main_thread = threading.current_thread() is threading.main_thread()  # no other is sent signals
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Stop:
    """Set by Ctrl-C and by SIGTERM; a second Ctrl-C interrupts at once."""

    signal: int | None = None


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Let a step be finished before a run is stopped."""
    stop = Stop()

    def handle(number: int, frame: object) -> None:
        if stop.signal:
            raise KeyboardInterrupt
        stop.signal = number

    if threading.current_thread() is not threading.main_thread():  # only the main thread is sent signals
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
