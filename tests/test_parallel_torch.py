"""Training in multiple processes matches one device: DistributedDataParallel, fully_shard, and parallelize_module."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import assert_same_bits
from parallel_torch import REFUSED, ends, environment, observed, run, trainer_of

import reference_numpy as ref
import transformer_torch
from reference_numpy import Checkpoint, Plan, save_checkpoint
from transformer_parity.transformer.distributed.cases import probes
from transformer_spec.checkpoint_directory import RUN, read_run
from transformer_spec.files import write_file
from transformer_spec.parallel_plan import tensor_axis
from transformer_torch.parallel_checkpoint import join_sharded, load_sharded, save_sharded, split_sharded

pytestmark = pytest.mark.only("torch")

GRADIENT, STEPS = 1e-11, 1e-10


def on_one_device(name, *steps):
    """Return the expected results of training on one device, after the last of the given parts.

    The reference computes them, except with dropout, for which each framework draws different masks.
    """
    probe = probes()[name]
    if probe.config.dropout.embedding:
        trainer = trainer_of(probe)
    else:
        model = ref.Transformer.from_weights(probe.config, probe.weights(), "float64")
        trainer = ref.Trainer(model, probe.settings, probe.seed)
    return [observed(trainer, probe, count) for count in steps][-1]


def off(found, expected):
    """Return the largest error of all arrays, relative to the largest magnitude of each expected array."""
    assert found.keys() == expected.keys()
    return max(np.abs(found[name] - array).max() / (np.abs(array).max() or 1.0) for name, array in expected.items())


def assert_agree(found, expected):
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-14)
    assert off(found["gradient"], expected["gradient"]) < GRADIENT
    np.testing.assert_allclose(found["steps"], expected["steps"], rtol=STEPS)
    np.testing.assert_allclose(found["evaluated"], expected["evaluated"], rtol=STEPS)
    for group in ("weights", "first moment", "second moment"):
        assert off(found[group], expected[group]) < STEPS, group


def assert_divided(held, plan, weights):
    """Check that each process stores one shard of each parameter. The shards are complete, and copies are identical."""
    shards = [process[name] for process in held for name in weights]
    assert all(len(parts) == 1 for parts in shards)
    assert [process[name][0].device for process in held for name in weights][:: len(weights)] == [*range(plan.devices)]
    for name, array in weights.items():
        covered = np.zeros(array.shape, int)
        for process in held:
            (shard,) = process[name]
            np.testing.assert_array_equal(shard.array, array[shard.index], strict=True)
            covered[shard.index] += 1
        parts = plan.fsdp * (1 if tensor_axis(name) is None else plan.tensor)
        assert covered.min() == covered.max() == plan.devices // parts, name


def engine(plan):
    """Return the name of the class that a trainer on this plan calls."""
    if plan.fsdp == plan.tensor == 1:
        return "DistributedDataParallel"
    return "FSDPTransformer" if plan.shards > 1 else "Transformer"


def assert_one_device_agrees(jobs, results):
    """Compare everything that the processes returned for training jobs with training on one device."""
    expected = {}
    for (_, job), processes in zip(jobs, results, strict=True):
        plan, name = Plan.parse(job["plan"]), job["probe"]
        if name not in expected:
            expected[name] = on_one_device(name, job["steps"])
        for found in processes:
            assert_agree(found, expected[name])
            assert found["steps"] == processes[0]["steps"]
            assert found["engine"] == engine(plan)
            assert off(found["weights"], processes[0]["weights"]) == 0.0  # all processes gather the same weights
        assert_divided([found["shards"] for found in processes], plan, processes[0]["weights"])


def agree_with_one_device(directory, plans, names, steps):
    """Train on plans with the same number of processes, and compare everything with one device."""
    jobs = [("train", {"plan": plan, "probe": name, "steps": steps}) for name in names for plan in plans]
    assert_one_device_agrees(jobs, [*zip(*run(directory, Plan.parse(plans[0]).devices, jobs), strict=True)])


TRAINED = [
    ("train", {"plan": plan, "probe": name, "steps": 2})
    for name in ("dropout", "vocabulary of 37")
    for plan in ("data=2", "fsdp=2", "tensor=2")
]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Return a directory and the results of two processes for all jobs, because starting processes is slow."""
    directory = tmp_path_factory.mktemp("two")
    jobs = [
        ("refused", {"plan": "fsdp=2", "attempts": [*REFUSED]}),
        ("search", {"plan": "data=2"}),
        ("train_on_a_mesh_of_the_user", {"axes": {"tensor": 1, "fsdp": 2}, "probe": "plain", "steps": 0}),
        ("train_on_a_mesh_of_the_user", {"axes": {"tensor": 2, "data": 1}, "probe": "plain", "steps": 0}),
        ("other_dropout", {"plan": "data=2"}),
        ("save", {"directory": directory / "run", "plan": "fsdp=2", "probe": "vocabulary of 37", "steps": 2}),
        ("go_on", {"path": directory / "run", "plan": "tensor=2", "probe": "vocabulary of 37", "steps": 2}),
        ("go_on", {"path": directory / "run.safetensors", "plan": "data=2", "probe": "vocabulary of 37", "steps": 2}),
        ("reductions", {}),
        ("loss_of_torch", {}),
    ]
    return directory, [*zip(*run(directory, 2, [*TRAINED, *jobs]), strict=True)]


def test_two_processes_match_one_device_in_training(two_processes):
    """Every engine supports dropout, accumulation, clipping, and uneven numbers of rows and tokens."""
    assert_one_device_agrees(TRAINED, two_processes[1][: len(TRAINED)])


def test_two_processes_match_one_device_in_search_and_checkpoints(two_processes):
    """Also test user-defined meshes, error messages, and the reason why ``loss_parallel`` isn't used."""
    directory, results = two_processes
    expected = on_one_device("vocabulary of 37", 2, 2)
    for found in zip(*results[len(TRAINED) :], strict=True):
        said, (trained, own), *meshes, dropout, again, from_the_directory, from_the_file, sums, loss = found
        assert said == REFUSED
        np.testing.assert_array_equal(trained.ids, own.ids)
        np.testing.assert_allclose(trained.scores, own.scores, rtol=1e-10)
        for trained_there in meshes:
            assert_agree(trained_there, on_one_device("plain", 0))
        assert dropout["local"] != pytest.approx(dropout["global"], rel=1e-3)
        assert dropout["local again"] == dropout["local"]
        assert again == f"{directory / 'run'} already exists; choose a different directory"
        for resumed in (from_the_directory, from_the_file):
            assert_agree(resumed, expected)
            assert resumed["progress"] == {"position": [3, 1]}
        # The forward pass has one sum for each of the 10 sublayers. The backward pass has one for each feed-forward
        # network and two for each attention, one for the queries and one for the keys and values.
        assert sums == 10 + 4 + 2 * 6
        # If this fails, https://github.com/pytorch/pytorch/issues/190746 is fixed, and the vocabulary can be sharded.
        assert loss > 0.01


PLANS = ("data=4", "fsdp=4", "tensor=4", "fsdp=2,tensor=2", "data=2,fsdp=2", "data=2,tensor=2")


@pytest.mark.extended("plans")
@pytest.mark.parametrize("name", ["plain", "vocabulary of 37"])
@pytest.mark.parametrize("plan", ["data=2", "fsdp=2", "tensor=2", *PLANS])
def test_twenty_steps_match_one_device(tmp_path, plan, name):
    agree_with_one_device(tmp_path, [plan], [name], 20)


@pytest.mark.extended("plans")
@pytest.mark.parametrize("plan", [*PLANS, "data=3", "data=2,fsdp=2,tensor=2"])
def test_every_case_on_every_plan_matches_one_device(tmp_path, plan):
    agree_with_one_device(tmp_path, [plan], [*probes()], 4)


@pytest.mark.parametrize(("world", "plan"), [(None, "data=2"), (1, "fsdp=2"), (3, "tensor=2")])
def test_wrong_number_of_processes_raises_value_error(monkeypatch, world, plan):
    """Each process raises the error immediately, before it waits for others."""
    for name, value in environment(0, world, 1).items() if world else ():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"plan {plan} requires exactly 2 devices: got {world or 1}; .*torchrun"):
        transformer_torch.make_mesh(Plan.parse(plan))


def test_single_process_mesh_matches_one_device():
    """Without a launcher, a mesh contains only this process."""
    probe = probes()["dropout"]
    try:
        found = observed(trainer_of(probe, mesh=transformer_torch.make_mesh(Plan())), probe, 2)
    finally:
        torch.distributed.destroy_process_group()
    assert_agree(found, on_one_device("dropout", 2))


@pytest.mark.extended("plans")
def test_missing_processes_cause_a_timeout_error(tmp_path):
    (said,) = ends(tmp_path, 2, [0], ("join", {"seconds": 3}), 100).values()
    assert said.startswith("not all 2 processes joined within 3 s: ")
    (said,) = ends(tmp_path, 2, [1], ("join", {"seconds": 3}), 100).values()
    assert said.startswith("not all 2 processes joined within 3 s: ")


@pytest.mark.extended("plans")
@pytest.mark.parametrize("plan", ["data=2", "fsdp=2", "tensor=2"])
def test_killed_process_stops_the_other(tmp_path, plan):
    """The other process doesn't wait for the killed one."""
    found = ends(tmp_path, 2, [0, 1], ("die", {"plan": plan}), 100)
    assert found[1] == -signal.SIGKILL
    assert found[0].startswith(("RuntimeError", "DistBackendError"))


@pytest.mark.extended("plans")
def test_error_in_one_process_fails_the_run(tmp_path):
    with pytest.raises(Exception, match="plan data=2 requires exactly 2 devices: got 3"):
        run(tmp_path, 3, [("train", {"plan": "data=2", "probe": "plain", "steps": 1})])


@pytest.mark.extended("plans")
def test_processes_started_by_torchrun_match_one_device(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pickle, pathlib, parallel_torch\n"
        "found = parallel_torch.train(int(os.environ['RANK']), 'data=2', 'plain', 1)\n"
        "pathlib.Path(__file__).with_name(os.environ['RANK']).write_bytes(pickle.dumps(found))\n"
        "parallel_torch.dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert_agree(pickle.loads((tmp_path / str(rank)).read_bytes()), on_one_device("plain", 1))


@pytest.mark.extended("plans")
@pytest.mark.parametrize("plan", ["data=2", "fsdp=2", "tensor=2"])
def test_plans_match_one_device_in_bfloat16_and_float32(tmp_path, plan):
    """Plans round differently than one device, but the results are within one device's rounding error."""
    found = run(tmp_path, 2, [("train_in", {"plan": plan, "mixed": mixed}) for mixed in (False, True)])[0]
    expected = observed(trainer_of(probes()["plain"]), probes()["plain"], 3)
    for results, tolerance in zip(found, (1e-5, 2e-2), strict=True):
        np.testing.assert_allclose(results["steps"], expected["steps"], rtol=tolerance)


# --- Sharded directories ---


def test_sharded_directory_and_single_file_convert_bit_exactly(tmp_path):
    """Each format is converted to the other, and all values are bitwise identical."""
    probe = probes()["plain"]
    trainer = trainer_of(probe)
    observed(trainer, probe, 2)
    weights, state = trainer.model.export_weights(), trainer.export_state()
    checkpoint = Checkpoint(probe.config, probe.settings, weights, state, {"position": 5}, b"vocabulary")
    split_sharded(tmp_path / "split", checkpoint)
    save_sharded(tmp_path / "saved", trainer, {"position": 5}, b"vocabulary")
    after = observed(trainer, probe, 1)
    for directory in ("split", "saved"):
        save_checkpoint(tmp_path / f"{directory}.safetensors", join_sharded(tmp_path / directory))
        resumed = trainer_of(probe)
        assert load_sharded(tmp_path / directory, resumed) == {"position": 5}
        assert_same_bits(resumed.model.export_weights(), weights)
        assert observed(resumed, probe, 1)["steps"] == after["steps"]
    assert (tmp_path / "split.safetensors").read_bytes() == (tmp_path / "saved.safetensors").read_bytes()
    save_checkpoint(tmp_path / "direct.safetensors", checkpoint)
    assert (tmp_path / "direct.safetensors").read_bytes() == (tmp_path / "saved.safetensors").read_bytes()


def damaged(directory, way):
    """Damage a directory in the given way."""
    if way == "missing checkpoint":
        (directory / "run.safetensors").unlink()
    elif way == "no metadata":
        (directory / ".metadata").unlink()
    elif way == "missing shards":
        (directory / "__0_0.distcp").unlink()
    elif way == "a negative step":
        run = read_run(directory)
        write_file(
            directory / RUN, {"config": run.config.to_dict(), "training": {**run.training, "step": -1}}, {}, None
        )


REFUSALS = {
    "missing checkpoint": (FileNotFoundError, "there is no sharded checkpoint"),
    "no metadata": (OSError, "metadata"),
    "a negative step": (ValueError, "run.safetensors is not a usable .*: step must be at least 0: got -1"),
    "missing shards": (OSError, "cannot read .*run in process 0: .*__0_0.distcp"),
    "a different model": (ValueError, r"contain source_embedding.weight as float64 \[37, 32\]: got float64 \[40, 32\]"),
    "a different dtype": (ValueError, r"contain source_embedding.weight as float32 \[40, 32\]: got float64 \[40, 32\]"),
    "shards of a different model": (ValueError, "contain target_embedding.weight as float64 .*: got nothing"),
}


@pytest.mark.parametrize("way", REFUSALS)
def test_invalid_sharded_checkpoint_is_rejected(tmp_path, way):
    probe, (error, message) = probes()["plain"], REFUSALS[way]
    save_sharded(tmp_path / "run", trainer_of(probe))
    damaged(tmp_path / "run", way)
    name = {"a different model": "vocabulary of 37", "shards of a different model": "untied"}.get(way, "plain")
    trainer = trainer_of(probes()[name], dtype="float32" if way == "a different dtype" else "float64")
    before = trainer.model.export_weights()
    with pytest.raises(error, match=message):
        load_sharded(tmp_path / "run", trainer)
    assert_same_bits(trainer.model.export_weights(), before)


def test_failed_sharded_save_leaves_no_directory(tmp_path):
    """A failed save leaves no directory with that name, and its temporary files don't prevent the next save."""
    trainer = trainer_of(probes()["plain"])
    with pytest.raises(ValueError, match="finite numbers"):
        save_sharded(tmp_path / "run", trainer, {"position": float("nan")})
    assert not (tmp_path / "run").exists()
    save_sharded(tmp_path / "run", trainer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
