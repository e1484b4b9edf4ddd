"""A process of a run on several devices: trains its part of each run that it is told of, and tells what it saw.

How the processes of a run find one another is in their environment, as the framework wants to hear it, and read by
``make_mesh``: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (as torchrun sets them); JAX_NUM_CPU_DEVICES,
for several devices of one process; nothing for TensorFlow, which divides the CPU of one process itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.parallel_plan import Plan
from reference_numpy.training_config import TrainingState
from transformer_parity.compare.exceptions import described
from transformer_parity.distributed.cases import Probe
from transformer_parity.mistakes.edited_package import edited_package
from transformer_parity.mistakes.mistake import Edit
from transformer_parity.ports.registry import PORTS
from transformer_parity.system.messages import Parent

Place = tuple[tuple[int, int], ...]  # start and stop along each axis
Held = tuple[int, Place, str]  # device, place in the whole, and hash of a part


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps: what it has to go on from, on any plan and in any framework."""

    weights: Mapping[str, ndarray]
    state: TrainingState


@dataclass(frozen=True)
class Task:
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
    """What one process saw of a run.

    Attributes:
        first: How many steps were taken before.
        losses: Of each step, per target token.
        tokens: Likewise.
        norms: Likewise, of the gradient before clipping.
        gradient: Of the first step, before clipping, whole.
        snapshots: After half of the steps, and after the last.
        shards: The parts of each parameter that are here, after the last step.
        refused: Why the framework has no such mesh; then there is nothing else.
        problem: An exception, likewise.
    """

    first: int = 0
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradient: Mapping[str, ndarray] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    shards: dict[str, list[Held]] = field(default_factory=dict)
    refused: str = ""
    problem: str = ""


def train(package: ModuleType, task: Task, meshes: dict[Plan, Any] | None = None) -> Seen:
    """Train the part of this process, and return what it saw.

    Args:
        package: One of the four.
        task: What to train.
        meshes: Those made so far: of the same devices, TensorFlow's disturb one another.
    """
    probe, plan = task.probe, task.plan
    meshes = {} if meshes is None else meshes
    if plan is not None and plan not in meshes:
        try:
            meshes[plan] = package.make_mesh(plan, "cpu")
        except ValueError as error:
            return Seen(refused=str(error))
    mesh = None if plan is None else meshes[plan]
    weights = probe.weights() if task.start is None else task.start.weights
    with getattr(mesh, "scope", nullcontext)():  # TensorFlow's strategies want a model to be made in theirs
        model = package.Transformer.from_weights(probe.config, weights, "float64", None if mesh else "cpu")
    trainer = package.Trainer(model, probe.settings, probe.seed, mesh=mesh, dropout=probe.dropout)
    if task.start is not None:
        trainer.load_state(task.start.state)
    first = 0 if task.start is None else task.start.state.step
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


def _described(parts: Iterable[Any]) -> list[Held]:
    """Return where each part lies, and a hash of its numbers."""
    return [
        (
            int(part.device),
            tuple((int(index.start or 0), int(index.stop)) for index in part.index),
            hashlib.sha256(np.ascontiguousarray(part.array).tobytes()).hexdigest(),
        )
        for part in parts
    ]


def work(parent: Parent) -> None:
    """Receive the name of a package and an environment, then tasks until there are no more; send what each gave."""
    backend, environment = parent.receive()
    os.environ.update(environment)  # before the framework is imported
    try:
        PORTS[backend].import_package()
    except Exception as error:
        parent.send(Seen(problem=described(error)))
        return
    meshes: dict[Plan, Any] = {}
    while (task := parent.receive()) is not None:
        try:
            seen = train(edited_package(PORTS[backend].package, task.edits), task, meshes)
        except Exception as error:
            seen = Seen(problem=described(error))
        parent.send(seen)
    described_by = PORTS[backend].import_package().describe()
    parent.send({name: str(value) for name, value in described_by.items()})  # which may start the framework
