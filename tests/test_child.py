"""Child processes exchange messages reliably and, however they end, leave no processes or files."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest
from conftest import child_processes, still_running

from transformer_parity.engine.processes import messages, orphans
from transformer_parity.engine.processes.child import ChildEndedError
from transformer_parity.engine.processes.children import Children
from transformer_parity.engine.processes.silence import Silence

posix = pytest.mark.needs(os.name != "nt", "signals")

FUNCTIONS = """
import os, signal, subprocess, sys, time, types

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

def answer(parent):
    while True:
        parent.send(2 * parent.receive())

def garbage(parent):
    print("to standard output", flush=True)
    os.write(1, b"\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x01 to its descriptor")
    os.system("echo from a shell")
    parent.send(sys.stdin.read())
    sys.stdout.close()
    os.close(1)
    with open("other", "w") as file:  # takes the descriptor
        assert file.fileno() in (0, 1)
        os.write(1, b"to another file")
        parent.send("written")

def many(parent):
    for number in range(10_000):
        parent.send((number, bytes(1000)))
    with open("sent", "w") as file:
        file.write("all")

def large(parent):
    parent.send(parent.receive()[::-1])

def of_its_own(parent):
    parent.send("here")
    kind = type("Kind", (), {"__module__": "only_there"})
    sys.modules["only_there"] = types.SimpleNamespace(Kind=kind)
    print("the last line", flush=True)
    parent.send(kind())
    time.sleep(20)

def forks_and_dies(parent):
    parent.send("here")
    if os.fork() == 0:
        time.sleep(600)
    print("the last line", flush=True)
    os._exit(7)

def forks_and_goes_on(parent):
    pid = os.fork()
    parent.send("once")
    os.waitpid(pid, 0)
    parent.send("twice")

def starts(parent):
    ours = subprocess.Popen(SLEEP)
    group = subprocess.Popen(SLEEP, process_group=0)
    parent.send([ours.pid, group.pid])
    time.sleep(600)

def holds_the_lock(parent):
    import ctypes
    parent.send([os.getpid()])
    ctypes.PyDLL(None).sleep(600)  # compiled code that keeps all other threads waiting

def ignores(parent):
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    starts(parent)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts one of the functions above in a child process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    with Children({**os.environ, "PYTHONPATH": str(tmp_path)}) as children:
        yield lambda name, *python: children.start(f"functions:{name}", *python)


def test_messages_are_answered_in_order(start):
    child = start("answer")
    for message in (1, "ab", [None]):
        child.send(message)
    assert [child.receive() for _ in range(3)] == [2, "abab", [None, None]]


def test_message_larger_than_the_pipe_is_delivered(start):
    message = os.urandom(1_000_000)
    children = [start("large") for _ in range(2)]
    for child in children:
        child.send(message)
    assert [child.receive() for child in children] == [message[::-1]] * 2


def test_arrays_of_every_kind_are_transferred_unchanged():
    numbers = np.arange(24.0).reshape(2, 3, 4)
    arrays = [
        numbers,
        numbers[:, ::2],
        numbers.T,
        numbers[:0],
        np.float32(3),
        np.array("text"),
        np.array([None, {1: 2}]),
    ]
    arrays += [np.array([None, {1: 2}]), numbers.astype(ml_dtypes.bfloat16)]
    parts = messages.parts(arrays)
    assert sum(isinstance(part, memoryview) for part in parts) > 1  # memoryviews aren't copied into the pickle
    sent = b"".join(parts)
    for array, found in zip(arrays, messages.receive(io.BytesIO(sent)), strict=True):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        assert found.ndim == 0 or found.flags.writeable
    for short in (sent[:4], sent[:20], sent[:-1]):
        with pytest.raises(EOFError, match="the stream ended after"):
            messages.receive(io.BytesIO(short))


def test_unread_messages_block_the_sender(start):
    child = start("many")
    assert child.receive()[0] == 0
    time.sleep(0.3)
    assert not Path("sent").exists()
    assert [child.receive()[0] for _ in range(9_999)] == list(range(1, 10_000))
    with pytest.raises(ChildEndedError, match="exit code 0"):
        child.receive()
    start("many").receive()  # leaving the block ends a child that is still waiting


def test_garbage_on_stdout_is_not_parsed_as_a_message(start, capfd):
    child = start("garbage")
    assert child.receive() == ""
    assert child.receive() == "written"
    assert Path("other").read_text() == "to another file"
    assert child.last_line().endswith("from a shell")
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def wrapped(tmp_path, start):
    """Return a function that starts a child from a shell script that runs a given line before or instead of Python."""

    def wrap(line):
        wrapper = tmp_path / "wrapper.sh"
        wrapper.write_text(f"#!/bin/sh\n{line.format(python=sys.executable)}\n")
        wrapper.chmod(0o755)
        return start("answer", str(wrapper))

    return wrap


@posix
def test_output_of_an_interpreter_wrapper_is_ignored(wrapped):
    child = wrapped('echo "Loading modules ..."; {python} "$@"; echo done')
    child.send(21)
    assert child.receive() == 42


@posix
@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("echo nothing else", "the process ended with exit code 0"),
        ("echo before; exit 5", "the process ended with exit code 5"),
        (
            "exec cat",
            "the process printed '' to standard output, which is reserved for messages; print to standard error in",
        ),
        (
            "exec yes 'hello world'",
            "the process printed 'hello world' to standard output, which is reserved for messages",
        ),
        (
            "printf 'a\\nb\\n\\0'; exec cat",
            "the process printed 'a' to standard output, which is reserved for messages",
        ),
    ],
)
def test_wrapper_that_starts_no_process_is_reported(line, how, wrapped, capfd):
    child = wrapped(line)
    child.send(list(range(100)))
    with pytest.raises(ChildEndedError) as ended:
        child.receive()
    assert ended.value.how.startswith(how)
    assert capfd.readouterr() == ("", "")


def test_message_that_cannot_be_unpickled_ends_the_process(start, capfd):
    child = start("of_its_own")
    assert child.receive() == "here"
    with pytest.raises(ChildEndedError) as ended:
        child.receive()
    said = "the process sent a message that cannot be unpickled: ModuleNotFoundError: No module named 'only_there'"
    assert (ended.value.how, ended.value.last_line) == (said, "the last line")
    assert child.process.poll() is not None
    assert capfd.readouterr() == ("", "")


@posix
def test_exit_of_a_forking_process_is_detected_immediately(start):
    child = start("forks_and_dies")
    assert child.receive() == "here"
    started = time.monotonic()
    with pytest.raises(ChildEndedError, match="the process ended with exit code 7: the last line"):
        child.receive()
    assert time.monotonic() - started < 5.0
    assert orphans.members(child.process.pid) == []


@posix
def test_process_that_exits_during_the_scan_is_skipped(monkeypatch):
    def ended(pid):
        raise psutil.NoSuchProcess(pid)

    assert os.getpid() in orphans.members(os.getsid(0))
    monkeypatch.setattr(psutil, "Process", ended)
    assert orphans.members(os.getsid(0)) == []


@posix
def test_forked_process_sends_no_messages(start):
    child = start("forks_and_goes_on")
    assert [child.receive(), child.receive()] == ["once", "twice"]
    with pytest.raises(ChildEndedError, match="exit code 0"):
        child.receive()


def test_leaving_the_block_ends_all_started_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    with Children() as children:
        child = children.start("functions:starts")
        started = [psutil.Process(pid) for pid in child.receive()]
        (children.directory / "weights").write_text("many")
    assert still_running(started) == []
    assert not children.directory.exists()
    assert child_processes() == []


PARENT = """
import signal
import time
from transformer_parity.engine.processes.children import Children
from transformer_parity.engine.system.interrupts import sigterm_is_ctrl_c

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup, around the tests, ignores
with sigterm_is_ctrl_c(), Children() as children:
    child = children.start("functions:{function}")
    (children.directory / "weights").write_text("many")
    print(child.process.pid, *child.receive(), flush=True)
    time.sleep(600)
"""


@posix
@pytest.mark.parametrize("function", ["starts", "ignores", "holds_the_lock"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGINT])
def test_children_and_their_directory_are_removed_with_the_parent(function, number, tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(function=function)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": paths},
    )
    started = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(list(temporary.glob("*/weights"))) == 1
    parent.send_signal(number)
    parent.wait(20)
    parent.stdout.close()
    assert still_running(started) == []
    deadline = time.monotonic() + 5.0
    while list(temporary.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(temporary.iterdir()) == []


@posix
def test_killed_command_leaves_no_processes_or_files(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-m", "transformer_parity", "check", "--backends", "torch", "--dtype", "float64"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert any("torch: " in line for line in parent.stderr)  # reading stops when its processes have started
    started = psutil.Process(parent.pid).children(recursive=True)
    assert len(started) == 2
    assert len(list(tmp_path.iterdir())) == 1
    parent.kill()
    parent.wait()
    parent.stderr.close()
    assert still_running(started) == []
    assert list(tmp_path.iterdir()) == []


class Clock:
    """A fake machine with a wall-clock time, a CPU time, and the idle times of two processors."""

    def __init__(self):
        self.now, self.used, self.idle = 0.0, 0.0, [0.0, 0.0]

    def measure(self, silence):
        return self.now, self.used, dict(enumerate(self.idle))


@pytest.mark.parametrize(
    ("used", "idle", "own"),
    [
        (0.0, (0.0, 0.0), 1.0),  # sleeps, on a busy machine
        (0.0, (1.0, 1.0), 1.0),
        (0.1, (0.0, 0.0), 0.1),  # waits for a processor
        (0.1, (0.0, 1.0), 1.0),  # sleeps most of the time
        (0.1, (0.3, 0.2), 0.3),
        (2.0, (0.0, 0.0), 1.0),  # computes in two threads
    ],
)
def test_silence_excludes_time_waiting_for_a_processor(used, idle, own, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(Silence, "_measure", lambda silence: clock.measure(silence))
    monkeypatch.setattr("transformer_parity.engine.processes.silence.time.monotonic", lambda: clock.now)
    silence = Silence(0)
    for second in range(1, 4):
        clock.now, clock.used = float(second), used * second
        clock.idle = [second * one for one in idle]
        assert silence.count(0.5) == pytest.approx(second * own)
    clock.now += 0.1
    assert silence.count(0.5) == pytest.approx(3 * own)  # too early for another measurement
    silence.heard()
    assert silence.count(0.5) == 0.0
    clock.now += 60.0
    assert silence.count(0.5) == 0.0
    clock.now += 60.0
    assert silence.count(0.5) == 1.0  # this process was suspended
