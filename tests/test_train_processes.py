"""The processes of ``parity train --parallel`` end together, whichever of them ends, and the run can be resumed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import assert_near, still_running
from test_train_parallel import EXACT, IN_PROCESSES, PROGRAM, TWO, few_dates, final  # noqa: F401  a fixture
from training_texts import SMALL, losses, resume, train

import reference_numpy as ref
from transformer_parity.apps.train import processes
from transformer_parity.apps.train.log import checkpoints, step_of
from transformer_parity.transformer.distributed import environments

SECONDS = 20  # maximum time until the processes end, with a margin for a busy machine
ONE_SHAPE = ("--set", "tokens_per_batch=1024")  # one shape for all batches, so that only the first step is compiled
WITHOUT_END = (*ONE_SHAPE, "--steps", "100000", "--set", "validate_every=100000", "save_every=100000")


@contextmanager
def running(directory, *options, environment=None):
    """Start a run, wait for its first step, and yield it with its output so far. Afterwards, kill all its processes."""
    command = [sys.executable, "-c", PROGRAM, "train", "--task", "dates", "--out", str(directory), *SMALL, *WITHOUT_END]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
    run = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        said = []
        for line in run.stderr:
            said.append(line)
            if line.startswith("step "):
                break
        yield run, said
    finally:
        for process in [*psutil.Process(run.pid).children(recursive=True), run] if run.poll() is None else []:
            process.kill()
        run.wait()
        run.stderr.close()


def members(run):
    """Return the training processes in order of rank."""
    processes = psutil.Process(run.pid).children(recursive=True)
    return [process for process in processes if "transformer_parity.apps.train.processes:work" in process.cmdline()]


def ended(run, processes, directory):
    """Wait for a run, check that all its processes end and that its lock is released, and return its output."""
    began = time.monotonic()
    said = run.stderr.read()
    run.wait(SECONDS)
    assert time.monotonic() - began < SECONDS
    assert still_running(processes) == []
    assert [path.name for path in directory.parent.glob("**/.*")] == []
    return said


def two(name):
    """Return the options for a run in two processes."""
    return "--backend", name, "--parallel", "data=2", *TWO[name]


def test_killed_process_ends_the_whole_run(tmp_path):
    with running(tmp_path / "run", "--backend", "numpy", "--parallel", "data=2") as (run, _):
        killed(run, 0, 1, tmp_path / "run")


def killed(run, rank, count, directory):
    """Kill a process of a run, and check that the run ends with an error message."""
    found = members(run)
    assert len(found) == count
    found[rank].kill()
    said = ended(run, found, directory)
    assert run.returncode == 3
    assert said.splitlines()[-1].startswith(
        f"parity train: error: process {rank} of {count} failed, so the other processes were stopped: the process "
        "ended with "
        "exit code -9 (SIGKILL)"
    )
    assert "Traceback" not in said


ELSEWHERE = {  # options for resuming each framework's run
    "torch": ("--backend", "jax", "--parallel", "data=2,tensor=2", "--processes", 2),
    "jax": ("--backend", "tf", "--parallel", "data=3"),
    "tf": ("--backend", "torch", "--parallel", "fsdp=2"),
}


@pytest.mark.extended("signals")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_run_with_a_killed_process_is_resumed_on_other_devices(name, rank, tmp_path):
    """The run is resumed with a different framework and plan, and matches an uninterrupted run."""
    directory, whole = tmp_path / "run", tmp_path / "whole"
    always = *EXACT, "--set", "dropout=0", "cooldown_steps=0"
    with running(directory, *two(name), *map(str, always), "--set", "save_every=1", "keep=9999") as (run, _):
        while not checkpoints(directory) and run.poll() is None:
            time.sleep(0.01)
        killed(run, rank, 2, directory)
    steps = step_of(checkpoints(directory)[-1]) + 2
    assert resume(directory, *ELSEWHERE[name], "--steps", steps) == 0
    assert train(whole, "--backend", "numpy", "--steps", steps, *always, *ONE_SHAPE) == 0
    assert_near(final(directory), final(whole), 1e-10)


@pytest.mark.extended("signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_stopped_run_is_saved_at_the_same_step_by_all_processes(name, number, tmp_path):
    directory = tmp_path / "run"
    with running(directory, *two(name)) as (run, _):
        found = members(run)
        run.send_signal(number)
        said = ended(run, found, directory)
    assert run.returncode == 128 + number
    (checkpoint,) = directory.glob("*.safetensors")
    step = ref.load_checkpoint(checkpoint).state.step
    assert f"stopped and saved at step {step:,}" in said
    assert max(losses(directory)) == step


@pytest.mark.extended("signals")
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_worker_processes_end_when_the_command_is_killed(name, tmp_path):
    with running(tmp_path / "run", *two(name)) as (run, _):
        found = members(run)
        run.kill()
        assert still_running(found, SECONDS) == []


# --- Errors in one process, or before all processes have joined ---


def failed(directory, name, monkeypatch, function=None):
    """Run two processes that fail, optionally with a different function, and check that both have ended."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    if function is not None:
        monkeypatch.setattr(processes, "WORK", f"parallel_train:{function}")
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    assert train(directory, *two(name), "--steps", 6) == 3
    children = psutil.Process().children(recursive=True)
    assert still_running([process for process in children if process.pid not in before]) == []


@pytest.mark.extended("signals")
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_exception_in_one_process_ends_the_whole_run(name, tmp_path, monkeypatch, capfd):
    failed(tmp_path / "run", name, monkeypatch, "fail_in_the_second")
    assert capfd.readouterr().err.splitlines()[-1] == (
        "parity train: error: process 1 of 2 failed, so the other processes were stopped: ZeroDivisionError: only here"
    )


@pytest.mark.extended("signals")
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_process_that_never_joins_is_reported_in_one_message(name, tmp_path, monkeypatch, capfd):
    failed(tmp_path / "run", name, monkeypatch, "lack_the_second")
    said = "process 1 of 2 did not join the other processes within 45 s, so all processes were stopped"
    assert capfd.readouterr().err.splitlines()[-1] == f"parity train: error: {said}"
    assert not (tmp_path / "run").exists()


@pytest.mark.extended("signals")
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_network_port_in_use_is_reported_in_one_message(name, tmp_path, monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(environments, "_bound", lambda one: taken.getsockname()[1])
        failed(tmp_path / "run", name, monkeypatch)
    said = capfd.readouterr().err
    assert re.search(r"parity train: error: .*(address.* in use|cannot listen on its address)", said, re.IGNORECASE)
    assert not (tmp_path / "run").exists()


UNEVEN = "plan data=3 requires exactly 3 devices: got 2"


@pytest.mark.extended("signals")
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_processes_that_contradict_the_plan_all_end_with_an_error(name, tmp_path):
    """The processes are started by another program, and each finds the other one in its environment.

    The first process to report the error exits, so JAX's other process may lose the connection before it counts the
    devices.
    """
    with environments.environments(name, 2, 2) as told:
        command = [sys.executable, "-c", PROGRAM, "train", "--task", "dates", "--out", str(tmp_path / "run"), *SMALL]
        command += ["--backend", name, "--parallel", "data=3"]
        started = [
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables})
            for variables in told
        ]
        try:
            said = [process.communicate(timeout=200)[1].splitlines()[-1] for process in started]
            assert [process.returncode for process in started] == [3, 3]
            reasons = (UNEVEN, "Connection reset by peer") if name == "jax" else (UNEVEN,)
            assert all(any(reason in line for reason in reasons) for line in said)
            assert any(UNEVEN in line for line in said)
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert not (tmp_path / "run").exists()
