"""Code of a worker process, which receives tasks, trains together with the other workers, and sends back the results.

``make_mesh`` reads environment variables that define the number of processes and how they connect to each other. In
PyTorch, they are the variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, and MASTER_PORT. JAX also
uses JAX_NUM_CPU_DEVICES to create multiple devices in one process. If TensorFlow runs in one process, no environment
variables are required, because TensorFlow itself divides the CPU into logical devices.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.outputs import MissingAbilityError
from transformer_parity.engine.processes import provenance
from transformer_parity.engine.processes.messages import Broken, Parent
from transformer_parity.engine.tensors import plain
from transformer_parity.transformer.bugs.bug import Edit
from transformer_parity.transformer.bugs.edited_package import edited_package
from transformer_parity.transformer.cases.for_ports import port_config
from transformer_parity.transformer.distributed.cases import Batch, Probe
from transformer_parity.transformer.distributed.jax_process import prepare_jax_process
from transformer_parity.transformer.ports.exceptions import described
from transformer_parity.transformer.ports.package import allow_dtype
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import PluginPort
from transformer_spec.config import DropoutRates, TransformerConfig
from transformer_spec.parallel_plan import Plan
from transformer_spec.training_config import TrainingState

Place = tuple[tuple[int, int], ...]  # start and stop of a shard along each axis
Held = tuple[int, Place, str]  # device of a shard, its position in the full parameter, and its hash
NO_DROPOUT = DropoutRates(embedding=0.0, residual=0.0)
OWN_LENGTH = 4  # all targets in a shard's own batch have this length, so all rows have the same weight in the loss
OWN_STEP = 1000  # ``own_batch`` adds the shard number to this step number, which is larger than any step of a run


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step. Every framework can resume the run from this state, regardless of the plan.

    Attributes:
        weights: One array per canonical name.
        state: Optimizer state; None for user ports.
    """

    weights: Mapping[str, ndarray]
    state: TrainingState | None


@dataclass(frozen=True)
class TrainingTask:
    """A run that all workers perform together.

    Attributes:
        probe: Model, settings, and batches.
        plan: The parallelism plan; None for one device without a mesh.
        start: Snapshot from which the run resumes; None to start at the first step.
        edits: Edits to the package that inject a bug; empty for no bug.
    """

    probe: Probe
    plan: Plan | None = None
    start: Snapshot | None = None
    edits: tuple[Edit, ...] = ()


@dataclass
class Seen:
    """The results of a run in one process.

    Attributes:
        first: Number of steps before the snapshot from which the run resumed; 0 if it didn't resume.
        losses: Loss of each step, per target token.
        tokens: Number of target tokens in each step; empty for user ports.
        norms: Gradient norm of each step before clipping; empty for user ports.
        gradient: Full gradient of the first step before clipping.
        snapshots: Dict from step numbers to snapshots, with one snapshot after half of the steps and one after the last
            step.
        shards: Dict from parameter names to the shards that this process stores after the last step.
        refused: Error message if the framework or the port doesn't support the plan; empty otherwise.
        config: Config of the user's port; None for packages.
        own_gradient: Gradient of the initial model if each shard receives a different batch; recorded only for user
            ports with one process per device.
        own_loss: Loss of an additional training step on these batches.
        sizes: Number of parameter elements on each device; recorded only for user ports, and only if the plan shards
            parameters or if one process controls all devices.
    """

    first: int = 0
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradient: Mapping[str, ndarray] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    shards: dict[str, list[Held]] = field(default_factory=dict)
    refused: str = ""
    config: TransformerConfig | None = None
    own_gradient: Mapping[str, ndarray] = field(default_factory=dict)
    own_loss: float = math.nan
    sizes: list[int] = field(default_factory=list)


def train(package: ModuleType, task: TrainingTask, meshes: dict[Plan, Any] | None = None, *, fast: bool = True) -> Seen:
    """Train in this process, and return the results.

    Args:
        package: One of the four packages.
        task: The run.
        meshes: Cache that maps plans to the meshes of earlier runs. TensorFlow requires this cache, because two meshes
            with the same devices would interfere with each other.
        fast: False to disable the fast paths and compute each formula exactly as written.
    """
    probe, plan = task.probe, task.plan
    meshes = {} if meshes is None else meshes
    allow_dtype(package, probe.dtype)
    if plan is not None and plan not in meshes:
        try:
            meshes[plan] = package.make_mesh(plan, "cpu")
        except ValueError as error:
            return Seen(refused=str(error))
    mesh = None if plan is None else meshes[plan]
    weights = probe.weights() if task.start is None else task.start.weights
    with getattr(mesh, "scope", nullcontext)():  # TensorFlow models must be created in the scope of the strategy
        model = package.Transformer.from_weights(probe.config, weights, probe.dtype, None if mesh else "cpu", fast=fast)
    trainer = package.Trainer(model, probe.settings, probe.seed, mesh=mesh, dropout=probe.dropout)
    first = 0
    if task.start is not None and task.start.state is not None:
        trainer.load_state(task.start.state)
        first = task.start.state.step
    found = trainer.gradient(*probe.batch(first))
    seen = Seen(first, gradient={name: np.asarray(array) for name, array in found.parameters.items()})
    for step in range(first, probe.steps):
        result = trainer.train_step(*probe.batch(step))
        seen.losses.append(float(result.loss))
        seen.tokens.append(int(result.tokens))
        seen.norms.append(float(result.gradient_norm))
        if step + 1 in (probe.halfway, probe.steps):
            seen.snapshots[step + 1] = Snapshot(model.export_weights(), trainer.export_state())
    if plan is not None:
        seen.shards = {name: _described(parts) for name, parts in package.shards(trainer).items()}
    return seen


def train_port(port: PluginPort, task: TrainingTask) -> Seen | None:
    """Train a user's port in this process and return the results, or None if another process controls all devices.

    Args:
        port: The user's port. The run uses the port's config, with dropout disabled.
        task: The run. It must start at the first step.
    """
    rank, plan = int(os.environ["RANK"]), task.plan or Plan()
    if port.kind.one_process and rank:
        return None
    probe = replace(task.probe, config=port_config(port).replace(dropout=NO_DROPOUT))
    seen = Seen(config=probe.config)
    divides_parameters = port.kind.one_process or plan.fsdp > 1 or plan.tensor > 1
    try:
        loaded = port.load(probe.config, probe.weights(), Placement(probe.dtype))
        for needed in ("gradients", "start_training", "train_step", "export_weights"):
            loaded.ability(needed)
        count_parameters = loaded.ability("parameters_per_device") if divides_parameters else list
        distribute = loaded.ability("distribute")
    except MissingAbilityError as error:
        return replace(seen, refused=str(error))
    try:
        distribute(plan)
    except ValueError as error:
        return replace(seen, refused=str(error))
    trainer = loaded.trainer(probe.settings)
    seen.gradient = plain(loaded.gradients(_named(probe.batch(0))).parameters)
    own = None if port.kind.one_process or plan.shards == 1 else _named(own_batch(probe, rank // plan.tensor))
    if own is not None:
        seen.own_gradient = plain(loaded.gradients(own).parameters)
    for step in range(probe.steps):
        seen.losses.append(float(trainer.train_step(**_named(probe.batch(step))).loss))
        if step + 1 in (probe.halfway, probe.steps):
            seen.snapshots[step + 1] = Snapshot(plain(loaded.export()), None)
    if own is not None:
        seen.own_loss = float(trainer.train_step(**own).loss)
    seen.sizes = [int(size) for size in count_parameters()]
    seen.shards = {
        name: [(rank, tuple((0, size) for size in array.shape), digest(array))]
        for name, array in seen.snapshots[probe.steps].weights.items()
    }
    return seen


def own_batch(probe: Probe, shard: int) -> Batch:
    """Return a batch for one shard. It has as many rows as the other batches of the run, but different sentences."""
    return replace(probe, lengths=(OWN_LENGTH,) * len(probe.lengths)).batch(OWN_STEP + shard)


def _named(batch: Batch) -> dict[str, ndarray]:
    """Return a dict from argument names to the arrays of a batch."""
    return dict(zip(("source_ids", "target_ids", "labels"), batch, strict=True))


def _described(parts: Iterable[Any]) -> list[Held]:
    """Return the device, position, and hash of each shard."""
    return [
        (
            int(part.device),
            tuple((int(index.start or 0), int(index.stop)) for index in part.index),
            digest(part.array),
        )
        for part in parts
    ]


def digest(array: ndarray) -> str:
    """Return a hash of the contents of an array."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def work(parent: Parent) -> None:
    """Set the environment variables for a framework or a port, perform the tasks, and send back their results."""
    backend, environment = parent.receive()
    os.environ.update(environment)  # must happen before the framework is imported
    try:
        run, describe = _package(backend) if backend in PORTS else _port(backend)
    except Exception as error:
        parent.send(Broken(described(error)))
        return
    while (task := parent.receive()) is not None:
        seen: Seen | Broken | None
        try:
            seen = run(task)
        except Exception as error:
            seen = Broken(described(error))
        parent.send(seen)
    # Call describe() last, because it may initialize the framework.
    parent.send({name: str(value) for name, value in describe().items()})


def _package(backend):
    """Import one of the four packages, and return a function that performs a task and a function that describes it."""
    provenance.import_packages()
    package, meshes = PORTS[backend].import_package(), dict[Plan, Any]()
    if backend == "jax":
        prepare_jax_process()
    return lambda task: train(edited_package(package.__name__, task.edits), task, meshes), lambda: {
        **package.describe(),
        **provenance.files_elsewhere(),
    }


def _port(reference):
    """Import a user's port, and return a function that performs a task and a function that describes the port."""
    port = PluginPort(reference)
    return partial(train_port, port), port.describe
