"""A process of a run on several devices: trains its part of each run that it is told of, and tells what it saw.

How the processes of a run find one another is in their environment, as the framework wants to hear it, and read by
``make_mesh``: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (as torchrun sets them); JAX_NUM_CPU_DEVICES,
for several devices of one process; nothing for TensorFlow, which divides the CPU of one process itself.
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
from transformer_parity.transformer.cases.for_ports import port_config
from transformer_parity.transformer.distributed.cases import Batch, Probe
from transformer_parity.transformer.distributed.jax_process import prepare_jax_process
from transformer_parity.transformer.mistakes.edited_package import edited_package
from transformer_parity.transformer.mistakes.mistake import Edit
from transformer_parity.transformer.ports.exceptions import described
from transformer_parity.transformer.ports.package import allow_dtype
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import PluginPort
from transformer_spec.config import DropoutRates, TransformerConfig
from transformer_spec.parallel_plan import Plan
from transformer_spec.training_config import TrainingState

Place = tuple[tuple[int, int], ...]  # start and stop along each axis
Held = tuple[int, Place, str]  # device, place in the whole, and hash of a part
NO_DROPOUT = DropoutRates(embedding=0.0, residual=0.0)
OWN_LENGTH = 4  # tokens of each target of a share's own batch, so that all rows have the same weight
OWN_STEP = 1000  # a step that no run reaches: a share's own batch has different sentences


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps: what it has to go on from, on any plan and in any framework.

    Attributes:
        weights: By canonical name.
        state: Of the optimizer; None of a port of the user's own.
    """

    weights: Mapping[str, ndarray]
    state: TrainingState | None


@dataclass(frozen=True)
class TrainingTask:
    """One run: what is trained, on which devices, and from where.

    Attributes:
        probe: Model, settings and batches.
        plan: The devices; None is one, without a mesh.
        start: Where the run goes on from; None is its beginning.
        edits: A mistake that is planted in the package.
    """

    probe: Probe
    plan: Plan | None = None
    start: Snapshot | None = None
    edits: tuple[Edit, ...] = ()


@dataclass
class Seen:
    """What one process saw of a run; of a port of the user's own, neither tokens nor norms.

    Attributes:
        first: How many steps were taken before.
        losses: Of each step, per target token.
        tokens: Likewise.
        norms: Likewise, of the gradient before clipping.
        gradient: Of the first step, before clipping, whole.
        snapshots: After half of the steps, and after the last.
        shards: The parts of each parameter that are here, after the last step.
        refused: Why the framework has no such mesh; then there is nothing else.
        config: That of a port of the user's own.
        own_gradient: Of such a port in several processes, the first gradient if every share has a different batch.
        own_loss: The loss of a step after the last, also with these batches.
        sizes: How many numbers of parameters each device of such a port holds, if a plan divides them.
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
    """Train the part of this process, and return what it saw.

    Args:
        package: One of the four.
        task: What to train.
        meshes: Those made so far: of the same devices, TensorFlow's disturb one another.
        fast: False trains with the formulas as they are written.
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
    with getattr(mesh, "scope", nullcontext)():  # TensorFlow's strategies want a model to be made in theirs
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
    """Train as this process of a port does, and return what it saw; None where another has all devices.

    Args:
        port: The user's own; the config of the run is the port's.
        task: What to train; it begins at the first step.
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
    own = None if port.kind.one_process or plan.shares == 1 else _named(own_batch(probe, rank // plan.tensor))
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


def own_batch(probe: Probe, share: int) -> Batch:
    """Return the batch that only one share gets: as many rows as usual, with different sentences."""
    return replace(probe, lengths=(OWN_LENGTH,) * len(probe.lengths)).batch(OWN_STEP + share)


def _named(batch: Batch) -> dict[str, ndarray]:
    """Return a batch by the names of the arguments."""
    return dict(zip(("source_ids", "target_ids", "labels"), batch, strict=True))


def _described(parts: Iterable[Any]) -> list[Held]:
    """Return where each part lies, and a hash of its numbers."""
    return [
        (
            int(part.device),
            tuple((int(index.start or 0), int(index.stop)) for index in part.index),
            digest(part.array),
        )
        for part in parts
    ]


def digest(array: ndarray) -> str:
    """Return a hash of the numbers of an array."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def work(parent: Parent) -> None:
    """Receive the name of a port and an environment, then tasks until there are no more; send what each gave."""
    backend, environment = parent.receive()
    os.environ.update(environment)  # before the framework is imported
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
    parent.send({name: str(value) for name, value in describe().items()})  # which may start the framework


def _package(backend):
    """Import one of the four packages; return what trains it, and what describes it."""
    provenance.import_packages()
    package, meshes = PORTS[backend].import_package(), dict[Plan, Any]()
    if backend == "jax":
        prepare_jax_process()
    return lambda task: train(edited_package(package.__name__, task.edits), task, meshes), lambda: {
        **package.describe(),
        **provenance.files_elsewhere(),
    }


def _port(reference):
    """Likewise, a port of the user's own."""
    port = PluginPort(reference)
    return partial(train_port, port), port.describe
