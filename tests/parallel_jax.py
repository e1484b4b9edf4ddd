"""Code that test_parallel_jax.py runs in separate processes, because JAX fixes the number of devices at startup."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from conftest import assert_same_bits  # noqa: F401  used by the programs in test_parallel_jax.py

import reference_numpy as ref
from reference_numpy import Plan
from transformer_parity.transformer.distributed.cases import probes  # noqa: F401  used by the programs
from transformer_parity.transformer.distributed.environments import environments
from transformer_parity.transformer.distributed.jax_process import prepare_jax_process

prepare_jax_process()  # required if this is one of multiple processes

GRADIENTS, STEPS = 1e-11, 1e-10  # tolerances for float64


@contextmanager
def started(program: str, processes: int, devices: int):
    """Start multiple processes that run the same program, and kill those that are still running on exit."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"from parallel_jax import *\n{program}"]
    running = []
    with environments("jax", processes * devices, processes) as environment:
        try:
            for told in environment:
                said = tempfile.TemporaryFile("w+")  # noqa: SIM115  the file is read after the process ends
                variables = {**os.environ, "PYTHONPATH": paths, "JAX_ENABLE_X64": "1", **told}
                process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=variables)
                running.append((process, said))
            yield running
        finally:
            for process, said in running:
                process.kill()
                process.wait()
                said.close()


def run(program: str, processes: int = 1, devices: int = 8, timeout: float = 300.0) -> list[str]:
    """Run a program in separate processes, check that each succeeds, and return their outputs."""
    with started(program, processes, devices) as running:
        printed = []
        for process, said in running:
            status = process.wait(timeout)
            said.seek(0)
            printed.append(said.read())
            assert status == 0, printed[-1][-4000:]
        return printed


# --- Helpers that run inside such a process ---


def trainer(probe, plan=None, backend="jax", **options):
    """Return a float64 trainer of a fresh model, on the devices of a plan or on one device."""
    import transformer_jax

    package = {"jax": transformer_jax, "numpy": ref}[backend]
    mesh = package.make_mesh(Plan.parse(plan)) if isinstance(plan, str) else plan
    model = package.Transformer.from_weights(probe.config, probe.weights(), "float64")
    return package.Trainer(model, probe.settings, probe.seed, mesh=mesh, **options)


def shallow(probe):
    """Return a case with one layer in each stack, which halves the compilation time."""
    return dataclasses.replace(probe, config=probe.config.replace(num_encoder_layers=1, num_decoder_layers=1))


def alone(probe):
    """Return a trainer with the expected results: the reference, or JAX on one device if the model uses dropout."""
    return trainer(probe, backend="numpy" if probe.config.dropout.embedding == 0 else "jax")


def assert_close(found, expected, budget):
    """Compare arrays by name. Errors are relative to the largest magnitude of the expected array."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        error = np.abs(found[name] - array).max() / max(np.abs(array).max(), 1e-300)
        assert error <= budget, (name, error)


def assert_same_gradient(one, many, batch):
    """Compare the loss and the gradient of a batch."""
    found, expected = many.gradient(*batch), one.gradient(*batch)
    assert abs(found.loss - expected.loss) <= 1e-13 * expected.loss, (found.loss, expected.loss)
    assert_close(found.parameters, expected.parameters, GRADIENTS)


def assert_same_steps(one, many, probe, steps=None):
    """Take the steps of a case, and compare their results and the final states."""
    for step in range(one.step, one.step + (steps or probe.steps)):
        batch = probe.batch(step)
        found, expected = many.train_step(*batch), one.train_step(*batch)
        for name, needed in vars(expected).items():
            assert abs(float(getattr(found, name)) - float(needed)) <= STEPS * float(needed), (step, found, expected)
        assert step or float(found.gradient_norm) > probe.settings.clip_norm  # so that gradients are clipped
    assert_same_state(many, one)


def assert_same_state(found, expected, budget=STEPS):
    """Compare the weights, moments, step, and seed of two trainers."""
    assert_close(found.model.export_weights(), expected.model.export_weights(), budget)
    ours, theirs = found.export_state(), expected.export_state()
    assert (ours.step, ours.seed) == (theirs.step, theirs.seed)
    assert_close(ours.first_moment, theirs.first_moment, budget)
    assert_close(ours.second_moment, theirs.second_moment, budget)


def follows(probe, plan, **options):
    """Compare training on a plan's devices with training on one device. Return both trainers."""
    many = trainer(probe, plan, **options)  # first, because a mesh must be created before JAX is used
    one = alone(probe)
    assert_same_gradient(one, many, probe.batch(0))
    assert_same_steps(one, many, probe)
    for got, needed in zip(many.evaluate(*probe.batch(0)), one.evaluate(*probe.batch(0)), strict=True):
        assert abs(float(got) - float(needed)) <= STEPS * float(needed), (got, needed)
    return one, many


def assert_divided(trainer):
    """Check that each device stores the shards that the plan specifies, bitwise identical to the parameters."""
    from transformer_jax import shards
    from transformer_spec.parallel_plan import fsdp_axis, tensor_axis

    plan, weights = trainer.plan, trainer.model.export_weights()
    held = shards(trainer)
    assert list(held) == list(weights)
    for name, array in weights.items():
        assert sorted(shard.device for shard in held[name]) == list(range(plan.devices))
        sizes = list(array.shape)
        for axis, parts in ((fsdp_axis(name, array.shape, plan.fsdp), plan.fsdp), (tensor_axis(name), plan.tensor)):
            if axis is not None:
                sizes[axis] //= parts
        covered = np.zeros(array.shape, bool)
        for shard in held[name]:
            assert shard.array.shape == tuple(sizes), name
            assert shard.array.tobytes() == array[shard.index].tobytes(), name
            covered[shard.index] = True
        assert covered.all(), name
    number = {shard.device: shard.index for shard in held["encoder.layers.0.feed_forward.inner_proj.kernel"]}
    fsdp, tensor = 32 // plan.fsdp, 48 // plan.tensor
    for device, index in number.items():  # device order: data, then fsdp, then tensor
        at = device // plan.tensor % plan.fsdp * fsdp, device % plan.tensor * tensor
        assert index == (slice(at[0], at[0] + fsdp), slice(at[1], at[1] + tensor)), (device, index)


class Compilations(logging.Handler):
    """A log handler that records JAX's compilations."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if "Compiling" in record.getMessage():
            self.found.append(record.getMessage())

    def __enter__(self):
        import jax

        jax.config.update("jax_log_compiles", True)
        logging.getLogger("jax").addHandler(self)
        return self.found

    def __exit__(self, *_):
        logging.getLogger("jax").removeHandler(self)
