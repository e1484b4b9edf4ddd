"""Training with TensorFlow's strategies matches training on one device in the reference, step by step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_near
from native_models import run_alone
from parallel_jax import shallow

import reference_numpy as ref
from reference_numpy import Plan
from transformer_parity.transformer.distributed.cases import probes

pytestmark = pytest.mark.only("tf")

SECONDS = 240  # maximum runtime, in case the processes deadlock


def trainer(package, probe, mesh=None, dtype="float64"):
    """Return a trainer of a fresh model, on one device or on a mesh."""
    with nullcontext() if mesh is None or package is ref else mesh.scope():
        model = package.Transformer.from_weights(probe.config, probe.weights(), dtype, "cpu")
    return package.Trainer(model, probe.settings, probe.seed, mesh=mesh, dropout=probe.dropout)


def assert_copies_are_equal(package, many):
    """Check that each device has a full copy of each parameter and that the copies are bitwise identical."""
    shards = package.shards(many)
    assert [*shards] == [*ref.parameter_shapes(many.model.config)]
    for name, copies in shards.items():
        whole = many.model.export_weights()[name]
        for copy in copies:
            assert np.array_equal(copy.array, whole[copy.index]), name
            assert copy.array.shape == whole.shape
    return {tuple(copy.device for copy in copies) for copies in shards.values()}


def same(plan, name, steps=None, expected=None, kind=lambda probe: probe):
    """Compare training on a plan with training on one device, by default the reference. Return both."""
    import transformer_tf as package

    mesh = package.make_mesh(Plan.parse(plan), "cpu")
    probe = kind(probes()[name])
    many, one = trainer(package, probe, mesh), trainer(expected or ref, probe)
    found, right = many.gradient(*probe.batch(0)), one.gradient(*probe.batch(0))
    assert found.loss == pytest.approx(right.loss, rel=1e-13)
    assert_near(found.parameters, right.parameters, 1e-11)
    for step in range(steps or probe.steps):
        found, right = many.train_step(*probe.batch(step)), one.train_step(*probe.batch(step))
        for number in ("loss", "tokens", "gradient_norm"):
            assert float(getattr(found, number)) == pytest.approx(float(getattr(right, number)), rel=1e-10)
    assert_near(many.model.export_weights(), one.model.export_weights(), 1e-10)
    state, right = many.export_state(), one.export_state()
    assert state.step == right.step
    assert_near(state.first_moment, right.first_moment, 1e-10)
    assert_near(state.second_moment, right.second_moment, 1e-10)
    return package, many, one


def on_two_devices():
    """Run the default tier's test in a process in which TensorFlow treats the CPU as two devices."""
    package, many, _ = same("data=2", "plain", kind=shallow)
    assert many.plan == Plan(data=2)
    assert assert_copies_are_equal(package, many) == {(0, 1)}


def test_two_devices_match_the_reference():
    run_alone("import test_parallel_tf as t; t.on_two_devices()")


@pytest.mark.extended("plans")
@pytest.mark.parametrize("name", ["plain", "vocabulary of 37", "untied", "accumulated", "checkpointing"])
@pytest.mark.parametrize("plan", ["data=2", "data=3", "data=4"])
def test_every_plan_matches_the_reference(plan, name):
    run_alone(f"import test_parallel_tf as t; t.same({plan!r}, {name!r}, steps=4)")


def with_dropout(plan):
    """Dropout is compared with TensorFlow on one device, because NumPy draws different masks."""
    import transformer_tf as package

    _, many, one = same(plan, "dropout", expected=package)
    probe = probes()["dropout"]
    scores = [pair.evaluate(*probe.batch(0)) for pair in (many, one)]
    for found, right in zip(*scores, strict=True):
        assert float(found) == pytest.approx(float(right), rel=1e-12)
    local = package.Trainer(many.model, probe.settings, probe.seed, mesh=many.mesh, dropout="local")
    losses = [pair.gradient(*probe.batch(0)).loss for pair in (many, local, local)]
    assert losses[1] == losses[2]
    assert abs(losses[1] - losses[0]) > 1e-3
    ids = probe.batch(0)[0][:2, :4]
    results = [package.greedy_search(pair.model, ids, 5).ids for pair in (many, one)]
    assert np.array_equal(*results)


@pytest.mark.extended("plans")
@pytest.mark.parametrize("plan", ["data=2", "data=3"])
def test_full_batch_dropout_matches_one_device(plan):
    run_alone(f"import test_parallel_tf as t; t.with_dropout({plan!r})")


def free_ports(count):
    """Return unused TCP ports on this machine."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def run_workers(program, count):
    """Run a program in multiple processes that train together."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(count)]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    processes = []
    try:
        for index in range(count):
            config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
            command = [sys.executable, "-c", program]
            processes.append(
                subprocess.Popen(command, env={**environment, "TF_CONFIG": config}, stderr=subprocess.PIPE, text=True)
            )
        for process in processes:
            _, said = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, said[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def as_a_worker(name):
    """Compare training in one of two processes with the reference."""
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    package, many, _ = same("data=2", name)
    assert assert_copies_are_equal(package, many) == {(index,)}


@pytest.mark.extended("plans")
@pytest.mark.parametrize("name", ["plain", "accumulated"])
def test_two_processes_match_the_reference(name):
    run_workers(f"import test_parallel_tf as t; t.as_a_worker({name!r})", 2)


def as_a_worker_of_its_own(change):
    """Give the second process a different input. Both processes must raise an error."""
    import transformer_tf as package

    probe = probes()["plain"]
    given = {"seed": 0, "batch": probe.batch(0), "weights": probe.weights()}
    mesh = package.make_mesh(Plan(data=2))
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        doubled = {name: 2 * array for name, array in probe.weights().items()}
        given[change] = {"seed": 1, "batch": probe.batch(1), "weights": doubled}[change]
    with mesh.scope():
        model = package.Transformer.from_weights(probe.config, given["weights"], "float64")
        many = package.Trainer(model, probe.settings, given["seed"], mesh=mesh)
    what = "weights" if change == "weights" else "seed, settings, and batch"
    with pytest.raises(ValueError, match=f"^all processes must have the same {what}: process 1 differs$"):
        many.gradient(*given["batch"])


@pytest.mark.extended("plans")
@pytest.mark.parametrize("change", ["seed", "batch", "weights"])
def test_workers_with_different_inputs_are_rejected(change):
    run_workers(f"import test_parallel_tf as t; t.as_a_worker_of_its_own({change!r})", 2)


def saved_and_loaded(directory):
    """A sharded directory saved on two devices can be resumed on one device. Incompatible directories are rejected."""
    import transformer_tf as package
    from transformer_tf.parallel_checkpoint import load_sharded, save_sharded

    probe = probes()["plain"]
    mesh = package.make_mesh(Plan(data=2), "cpu")
    many, one = trainer(package, probe, mesh), trainer(package, probe)
    many.train_step(*probe.batch(0))
    save_sharded(Path(directory) / "run", many, {"position": [0, 1]}, b"subwords")
    assert load_sharded(Path(directory) / "run", one) == {"position": [0, 1]}
    assert (one.step, one.seed) == (1, probe.seed)
    results = [float(pair.train_step(*probe.batch(1)).loss) for pair in (many, one)]
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    with pytest.raises(FileExistsError, match=r"run already exists; choose a different directory$"):
        save_sharded(Path(directory) / "run", many)
    other = trainer(package, probes()["untied"])
    with pytest.raises(ValueError, match=r"must contain \S+ as float64 .*: got "):
        load_sharded(Path(directory) / "run", other)
    assert [path.name for path in Path(directory).iterdir()] == ["run"]


@pytest.mark.extended("plans")
def test_checkpoint_directory_loads_under_another_plan(tmp_path):
    run_alone(f"import test_parallel_tf as t; t.saved_and_loaded({str(tmp_path)!r})")


# --- Errors ---


@pytest.mark.parametrize("plan", ["fsdp=2", "tensor=2", "data=2,fsdp=2"])
def test_axes_other_than_data_are_rejected(port, plan):
    with pytest.raises(ValueError, match=r"^TensorFlow's strategies support only the axis 'data': got"):
        port.package.make_mesh(Plan.parse(plan))


def test_plan_with_more_devices_than_available_is_rejected(port):
    """TensorFlow has already started, so the CPU remains one device."""
    import tensorflow as tf

    assert len(tf.config.list_logical_devices("CPU")) == 1  # listing the devices initializes them
    with pytest.raises(
        ValueError, match=r"^plan data=7 requires exactly 7 devices: got 1; to split a CPU into devices,"
    ):
        port.package.make_mesh(Plan(data=7), "cpu")


def test_trainer_rejects_unsupported_strategies(port):
    import tensorflow as tf

    model = port.package.Transformer.from_weights(probes()["plain"].config, probes()["plain"].weights())
    for mesh in (Plan(), tf.distribute.OneDeviceStrategy("/CPU:0")):
        with pytest.raises(TypeError, match=r"^mesh must be a MirroredStrategy or a MultiWorkerMirroredStrategy: got"):
            port.package.Trainer(model, ref.TrainingConfig(), mesh=mesh)
    with pytest.raises(ValueError, match=r"^dropout must be .*global.*local.*: got 'none'"):
        port.package.Trainer(model, ref.TrainingConfig(), dropout="none")


def test_compile_option_is_rejected_on_a_mesh(port):
    model = port.package.Transformer.from_weights(probes()["plain"].config, probes()["plain"].weights())
    mesh = port.package.make_mesh(Plan(), "cpu")
    with pytest.raises(ValueError, match=r"^compile=True does not support a mesh"):
        port.package.Trainer(model, ref.TrainingConfig(), mesh=mesh, compile=True)


ALONE = """
import faulthandler, json, os, sys
from unittest import mock
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}})
import transformer_tf
from transformer_spec.parallel_plan import Plan
from transformer_tf import parallel
with mock.patch.object(parallel, "_multi_worker", side_effect=KeyError), mock.patch.object(
    faulthandler, "dump_traceback_later"
) as timer:
    try:
        transformer_tf.make_mesh(Plan(data=2), "cpu")
    except KeyError:
        print(timer.called)
"""


def test_mesh_with_missing_peers_does_not_end_the_process():
    """Only ``parity train`` ends a process whose peers don't join."""
    assert run_alone(ALONE).strip() == "False"
