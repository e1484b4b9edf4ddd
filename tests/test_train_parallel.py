"""``parity train --parallel``: the processes of a plan train what one device trains, and end together."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from conftest import still_running
from test_train import SMALL, losses, resume, saved_weights, train

import reference_numpy as ref
from reference_numpy import Plan
from transformer_parity.cli.main import main
from transformer_parity.train import corpora, group
from transformer_parity.train.group import Group

EXACT = ("--dtype", "float64", "--heads", 4)
ONLY_TORCH = pytest.mark.only("torch")
SECONDS = 20  # in which processes have to end; most of it for a busy machine
PLANS = {
    "numpy": ["data=2,fsdp=2,tensor=2"],
    "torch": ["data=2", "fsdp=2", "tensor=2", "data=2,fsdp=2"],
    "jax": ["data=2", "fsdp=2,tensor=2"],
    "tf": ["data=2", "data=4"],
}


@pytest.fixture(autouse=True)
def few_dates(monkeypatch):
    make_few(monkeypatch)


def make_few(monkeypatch):
    """Let the dates be few; other processes are sent them."""
    monkeypatch.setattr(corpora, "DATES_TRAINED", 40)
    monkeypatch.setattr(corpora, "DATES_HELD_OUT", 6)


def agree(found, expected, tolerance=1e-10):
    """Compare weights by name, each by its largest magnitude."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() <= tolerance * np.abs(array).max(), name


def final(folder):
    return saved_weights(folder / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run on one device, without dropout, which each framework would draw otherwise."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    with pytest.MonkeyPatch.context() as patch:
        make_few(patch)
        assert train(folder, "--backend", "numpy", "--steps", 6, "--dropout", 0, *EXACT) == 0
    return folder


def test_a_plan_changes_nothing_in_the_reference(alone, tmp_path, capfd):
    folder = tmp_path / "run"
    plan = "--parallel", "data=2,tensor=2"
    assert train(folder, "--backend", "numpy", "--steps", 6, "--dropout", 0, *EXACT, *plan) == 0
    assert "on 4 devices, data=2,tensor=2, of 1 process" in capfd.readouterr().err
    agree(final(folder), final(alone))
    assert {path.name for path in folder.iterdir()} == {path.name for path in alone.iterdir()}
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-12)


@pytest.mark.only("torch")
def test_a_run_goes_on_with_other_devices_in_another_framework(alone, tmp_path, capfd):
    """Two processes of PyTorch, then one device of NumPy."""
    folder = tmp_path / "run"
    options = "--backend", "torch", "--parallel", "data=2", "--steps", 6, "--stop-at", 3, "--save-every", 2
    assert train(folder, *options, "--dropout", 0, *EXACT) == 0
    said = capfd.readouterr().err
    assert "on 2 devices, data=2, of 2 processes" in said
    assert f"parity train --resume {folder} --backend torch --parallel data=2" in said
    assert (folder / "checkpoint-0000003.safetensors").exists()
    assert resume(folder, "--backend", "numpy") == 0
    agree(final(folder), final(alone))


@pytest.mark.extended("plans")
@pytest.mark.parametrize(
    ("name", "plan"),
    [pytest.param(name, plan, marks=pytest.mark.only(name)) for name, plans in PLANS.items() for plan in plans],
)
def test_every_plan_ends_with_the_weights_of_one_device(name, plan, alone, tmp_path):
    options = "--backend", name, "--steps", 6, "--dropout", 0, *EXACT
    assert train(tmp_path / "run", *options, "--parallel", plan) == 0
    agree(final(tmp_path / "run"), final(alone))


# --- All processes end, together ---

# A run of few dates, in a process that takes signals as a command does.
PROGRAM = """
import sys
from transformer_parity.cli.main import main
from transformer_parity.train import corpora
corpora.DATES_TRAINED, corpora.DATES_HELD_OUT = 40, 6
sys.exit(main(sys.argv[1:]))
"""
WITHOUT_END = ("--steps", "100000", "--validate-every", "100000", "--save-every", "100000")


@contextmanager
def running(folder, *options, environment=None):
    """Start a run, wait for its first step, and yield it with what it has said; nothing is left of it afterwards."""
    command = [sys.executable, "-c", PROGRAM, "train", "--task", "dates", "--out", str(folder), *SMALL, *WITHOUT_END]
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
    """Return the processes that train, the first one first."""
    processes = psutil.Process(run.pid).children(recursive=True)
    return [process for process in processes if "transformer_parity.train.processes:work" in process.cmdline()]


def ended(run, processes, folder):
    """Return what a run has said at its end, which comes soon, for all of its processes; its folder is free again."""
    began = time.monotonic()
    said = run.stderr.read()
    run.wait(SECONDS)
    assert time.monotonic() - began < SECONDS
    assert still_running(processes) == []
    assert [path.name for path in folder.parent.glob("**/.*")] == []
    return said


@pytest.mark.parametrize(
    ("name", "processes", "rank"),
    [
        ("numpy", 1, 0),
        *(pytest.param("torch", 2, rank, marks=[ONLY_TORCH, pytest.mark.extended("signals")]) for rank in (0, 1)),
    ],
)
def test_a_process_that_is_killed_ends_all(name, processes, rank, tmp_path):
    with running(tmp_path / "run", "--backend", name, "--parallel", "data=2") as (run, _):
        found = members(run)
        assert len(found) == processes
        found[rank].kill()
        said = ended(run, found, tmp_path / "run")
    assert run.returncode == 3
    assert said.splitlines()[-1] == (
        f"parity train: error: process {rank} of {processes} failed, and the others were ended: the process ended with "
        "exit code -9 (SIGKILL)"
    )
    assert "Traceback" not in said


@pytest.mark.only("torch")
@pytest.mark.extended("signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_stopped_run_is_saved_at_the_same_step_by_all(number, tmp_path):
    folder = tmp_path / "run"
    with running(folder, "--backend", "torch", "--parallel", "data=2") as (run, _):
        processes = members(run)
        run.send_signal(number)
        said = ended(run, processes, folder)
    assert run.returncode == 128 + number
    (checkpoint,) = folder.glob("*.safetensors")
    step = ref.load_checkpoint(checkpoint).state.step
    assert f"stopped at step {step:,}; saved" in said
    assert max(losses(folder)) == step


@pytest.mark.only("torch")
@pytest.mark.extended("signals")
def test_the_processes_end_with_the_command_however_that_ends(tmp_path):
    with running(tmp_path / "run", "--backend", "torch", "--parallel", "data=2") as (run, _):
        processes = members(run)
        run.kill()
        assert still_running(processes, SECONDS) == []


def listening():
    """Return a socket that something else has, and its port."""
    taken = socket.create_server(("127.0.0.1", 0))
    return taken, taken.getsockname()[1]


@pytest.mark.only("torch")
@pytest.mark.extended("signals")
def test_a_port_in_use_is_one_message(tmp_path, monkeypatch, capfd):
    taken, port = listening()
    monkeypatch.setattr(group, "_free_ports", lambda count: [port] * count)
    with taken:
        assert train(tmp_path / "run", "--backend", "torch", "--parallel", "data=2", "--steps", 1) == 3
    said = capfd.readouterr().err
    assert re.search(r"parity train: error: .*address already in use", said, re.IGNORECASE)
    assert not (tmp_path / "run").exists()


@pytest.mark.only("torch")
@pytest.mark.extended("signals")
def test_under_torchrun_the_environment_decides(alone, tmp_path):
    """Two processes that torchrun starts; the first writes and speaks."""
    folder = tmp_path / "run"
    options = ["--out", folder, *SMALL, *EXACT, "--backend", "torch", "--steps", 6, "--dropout", 0]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    command = [*launcher, "train", "--task", "dates", *map(str, options), "--parallel", "fsdp=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    agree(final(folder), final(alone))
    assert done.stdout.count("held-out loss") == 1
    assert done.stderr.count("on 2 devices, fsdp=2, of 2 processes") == 1


# --- What is refused, and who decides ---

REFUSED = {
    "no plan": (["--parallel", "data"], "a plan must be like data=2,fsdp=2,tensor=2: got 'data'"),
    "processes without a plan": (["--processes", "2"], "--processes share a plan: say which"),
    "lockstep": (["--parallel", "data=2", "--backend", "numpy,torch"], "--parallel is about one backend"),
    "NumPy in two": (["--parallel", "data=2", "--processes", "2"], "NumPy simulates a plan in one process: got 2"),
    "heads": (["--parallel", "tensor=3"], "num_heads of the encoder must be divisible by tensor=3: got 2"),
}


def refused(folder, *options):
    """Return the exit code of a run, also of one whose options cannot be read."""
    try:
        return train(folder, "--backend", "numpy", "--steps", 1, *options)
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused(case, tmp_path, capfd):
    options, message = REFUSED[case]
    code = refused(tmp_path / "run", *options)
    assert code == 3
    assert message in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "environment", "expected"),
    [
        ("torch", {}, None),
        ("torch", {"RANK": "1", "WORLD_SIZE": "4"}, Group(1, 4)),
        ("jax", {"JAX_COORDINATOR_ADDRESS": "a:1", "SLURM_PROCID": "2", "SLURM_NTASKS": "8"}, Group(2, 8)),
        ("jax", {"RANK": "1", "WORLD_SIZE": "4"}, None),
        ("tf", {"TF_CONFIG": json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]},
                                         "task": {"type": "worker", "index": 1}})}, Group(2, 3)),
        ("numpy", {"WORLD_SIZE": "4"}, None),
    ],
)  # fmt: skip
def test_the_environment_says_which_process_this_is(name, environment, expected):
    assert group.found(name, environment) == expected


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "first"}])
def test_a_group_that_is_none(environment):
    with pytest.raises(ValueError, match=r"^the environment names a group of processes"):
        group.found("torch", environment)


def test_each_process_is_told_in_the_words_of_its_framework():
    plan = Plan(data=2, fsdp=2)
    torch, jax, tf = (group.environments(name, plan, 4) for name in ("torch", "jax", "tf"))
    for rank in range(4):
        assert group.found("torch", torch[rank]) == Group(rank, 4)
        assert group.found("jax", jax[rank]) == Group(rank, 4)
        assert group.found("tf", tf[rank]) == Group(rank, 4)
        assert jax[rank]["JAX_NUM_CPU_DEVICES"] == "1"
    assert len({variables["MASTER_PORT"] for variables in torch}) == 1
    assert group.environments("jax", plan, 1) == [{"JAX_NUM_CPU_DEVICES": "4"}]
    assert group.environments("tf", plan, 1) == [{}]
    srun = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    with pytest.raises(ValueError, match=r"^under srun, say where the first process is: export MASTER_ADDR="):
        group.taken_from_slurm(srun)
    found = group.taken_from_slurm({**srun, "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert found == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


# --- One file, and the folders of the frameworks ---


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.only(name)) for name in ("torch", "tf")])
def test_a_file_is_split_and_joined_again(name, alone, tmp_path, capfd):
    path, folder, again = alone / "checkpoint-0000006.safetensors", tmp_path / "parts", tmp_path / "again.safetensors"
    assert main(["checkpoint", "split", str(path), "--backend", name, "--out", str(folder)]) == 0
    assert main(["checkpoint", "join", str(folder), "--out", str(again)]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"{folder}: step 6, for {name}",
        f"{again}: step 6, from a folder of {name}",
    ]
    assert again.read_bytes() == path.read_bytes()
    for command, message in (
        (["join", str(folder), "--out", str(again)], f"{again} exists already"),
        (["join", str(tmp_path / "none"), "--out", str(tmp_path / "x")], "there is no folder"),
        (["split", str(path), "--backend", name, "--out", str(folder)], f"{folder} exists already"),
        (["split", str(alone / "model.safetensors"), "--backend", name, "--out", str(tmp_path / "x")], "holds weights"),
    ):
        assert main(["checkpoint", *command]) == 3
        assert message in capfd.readouterr().err
    assert {one.name for one in tmp_path.iterdir()} == {"parts", "again.safetensors"}
