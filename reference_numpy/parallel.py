"""Training on several simulated devices, which process their shards of each batch one after another."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.runtime import check_placement
from transformer_spec.checks import check_choice, check_integer, check_type, random_stream
from transformer_spec.config import TransformerConfig
from transformer_spec.names import find, parameter_shapes
from transformer_spec.parallel_plan import DROPOUTS, Plan, Shard, fsdp_axis, spread, tensor_axis
from transformer_spec.shapes import Float


def make_mesh(plan: Plan, device: str | None = None) -> Plan:
    """Return the plan itself. A ``Trainer`` simulates the plan's devices.

    Args:
        plan: Number of devices along each axis.
        device: ``cpu`` or None. Both have the same effect.

    Raises:
        ValueError: If the device is unknown.
    """
    check_placement("float32", device)
    return plan


def plan_of(mesh: Any, config: TransformerConfig) -> Plan:
    """Return the plan of a mesh. Without a mesh, return a plan for one device.

    Raises:
        TypeError: If the mesh is not a ``Plan``.
        ValueError: If the plan can't divide the model.
    """
    plan = Plan() if mesh is None else mesh
    check_type("mesh", plan, Plan)
    plan.check(config)
    return plan


def shards(trainer: Any) -> dict[str, list[Shard]]:
    """Return the shards of each parameter on the devices of this process, keyed by canonical name.

    Args:
        trainer: Trainer whose parameters are returned. If the trainer has no mesh, each parameter is one shard.
    """
    plan = trainer.plan
    places = [*itertools.product(range(plan.data), range(plan.fsdp), range(plan.tensor))]
    held = {}
    for name, shape in parameter_shapes(trainer.model.config).items():
        parameter = find(trainer.model, name)
        indices = [_index(name, shape, plan, place) for place in places]
        held[name] = [Shard(device, index, parameter[index]) for device, index in enumerate(indices)]
    return held


def divide(trainer: Any, batch: Sequence[ndarray]) -> Iterator[tuple[Sequence[ndarray], Any]]:
    """For each shard of each micro-batch, yield the shard's rows and its random generator for dropout."""
    check_choice("dropout", trainer.dropout, DROPOUTS)
    entropy = random_stream(*(check_integer(name, getattr(trainer, name), minimum=0) for name in ("seed", "step")))
    plan, micro_batches = trainer.plan, trainer.settings.accumulation_steps
    parts = [spread(ids, micro_batches, plan.shards, trainer.model.config.pad_id) for ids in batch]
    rows, own = len(batch[0]) // micro_batches, parts[0].shape[2]
    generators = [
        np.random.default_rng([*entropy, shard])
        if trainer.dropout == "local"
        else _OwnRows(np.random.PCG64(entropy), rows, shard * own)
        for shard in range(plan.shards)
    ]
    for number, shard in itertools.product(range(micro_batches), range(plan.shards)):
        yield [ids[number, shard] for ids in parts], generators[shard]


class _OwnRows(np.random.Generator):
    """Random generator that samples numbers for all rows of a micro-batch and returns only the rows of one shard.

    Padding rows at the end of the shard are filled with 1.
    """

    def __init__(self, bits: np.random.BitGenerator, rows: int, first: int) -> None:
        super().__init__(bits)
        self.rows, self.first = rows, first

    def __deepcopy__(self, memo: dict[int, object]) -> _OwnRows:
        return _OwnRows(copy.deepcopy(self.bit_generator, memo), self.rows, self.first)

    def random(self, shape: tuple[int, ...], dtype: type) -> Float[ndarray, "*axes"]:  # type: ignore[override]
        drawn = super().random((self.rows, *shape[1:]), dtype)[self.first : self.first + shape[0]]
        padding: ndarray = np.ones((shape[0] - len(drawn), *shape[1:]), dtype)
        return np.concatenate([drawn, padding]) if len(padding) else drawn


def _index(name: str, shape: tuple[int, ...], plan: Plan, place: tuple[int, int, int]) -> tuple[slice, ...]:
    """Return the index of a parameter's shard on the device at the given position in the mesh."""
    index = [slice(0, size) for size in shape]
    divided = (fsdp_axis(name, shape, plan.fsdp), plan.fsdp, place[1]), (tensor_axis(name), plan.tensor, place[2])
    for axis, parts, part in divided:
        if axis is not None:
            size = shape[axis] // parts
            index[axis] = slice(part * size, (part + 1) * size)
    return tuple(index)
