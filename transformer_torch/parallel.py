"""Training on several devices, with one process per device, using ``torch.distributed``.

DistributedDataParallel replicates the model, ``fully_shard`` shards its parameters, and ``parallelize_module`` divides
attention heads and feed-forward networks. Each process must call ``make_mesh`` before it creates a model on a GPU. If
no process group exists yet, ``make_mesh`` creates one from the environment variables that ``torchrun`` sets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from transformer_spec.config import TransformerConfig
from transformer_spec.parallel_plan import AXES, Plan, Shard, spread, tensor_axis
from transformer_spec.shapes import Float, Int
from transformer_torch.attention import MultiHeadAttention
from transformer_torch.feed_forward import GatedFeedForward, PositionwiseFeedForward
from transformer_torch.layers import Dropout, OwnDropout
from transformer_torch.relative_position import RelativePositionBias
from transformer_torch.runtime import to_device
from transformer_torch.transformer import Transformer
from transformer_torch.weights import copy_out, is_divided, local_part, parameters

JOINING = timedelta(seconds=60)  # maximum time to wait for the other processes to start
# Tensor parallelism divides the inputs of the dropout layers in these blocks. The values are the divided axes.
DIVIDED_AXES: dict[type, int] = {MultiHeadAttention: 1, PositionwiseFeedForward: 2, GatedFeedForward: 2}
HOW = "start one process per device, for example with torchrun --nproc-per-node"


def make_mesh(plan: Plan, device: torch.device | str | None = None) -> DeviceMesh:
    """Return a ``DeviceMesh`` for a ``Trainer``, with one process per device.

    If no process group exists, the process first joins one, as specified by the environment variables that ``torchrun``
    sets.

    Args:
        plan: Number of devices along each axis.
        device: Type of device, such as ``cpu`` or ``cuda``. If None, PyTorch's default device is used.

    Raises:
        ValueError: If the number of processes doesn't match the plan.
        RuntimeError: If the device is not visible, or the other processes don't join in time.
    """
    kind = to_device(device).type
    if not dist.is_initialized():
        plan.check_devices(int(os.environ.get("WORLD_SIZE", "1")), HOW)
        _join(kind)
    plan.check_devices(dist.get_world_size(), HOW)
    sizes = {axis: getattr(plan, axis) for axis in AXES if getattr(plan, axis) > 1} or {"data": 1}
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def plan_of(mesh: Any, config: TransformerConfig) -> Plan:
    """Return the plan of a mesh that ``make_mesh`` or the user created. Without a mesh, return a plan for one device.

    Raises:
        TypeError: If the mesh is not a ``DeviceMesh``.
        ValueError: If the mesh has an unknown axis, or can't divide the model.
    """
    if mesh is None:
        return Plan()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh: got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ("(without a name)",)
    plan = Plan.of_axes(dict(zip(names, mesh.shape, strict=False)))
    plan.check(config)
    return plan


def shards(trainer: Any) -> dict[str, list[Shard]]:
    """Return the shards of each parameter on the devices of this process, keyed by canonical name.

    Args:
        trainer: Trainer whose parameters are returned. If the trainer has no mesh, each parameter is one shard.
    """
    number = trainer.shard.number
    held = {}
    for name, parameter in parameters(trainer.model).items():
        index, local = local_part(parameter)
        index = index[::-1] if name.endswith("kernel") else index
        held[name] = [Shard(number, index, copy_out(name, local))]
    return held


class BatchShard:
    """The part of each step that one process computes: its rows of each micro-batch and its shard of the model.

    Args:
        model: Model, which is divided in place.
        mesh: Devices of all processes. If None, only the model's device is used.
        dropout: ``global`` or ``local``.

    Attributes:
        module: Module that computes the logits and reduces the gradients.
        number: Index of this process in the mesh.

    Raises:
        ValueError: If the model is on a different device or is already divided or wrapped, or if a process is not in
            the mesh.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None, dropout: str) -> None:
        self.module, self.number, self.index, self.mesh = model, 0, 0, mesh
        if mesh is None:
            return
        self.plan, self.pad_id = _check(model, mesh)
        self.whole = _with_all_axes(mesh, self.plan)
        place = self.whole.get_coordinate()
        self.index = place[0] * self.plan.fsdp + place[1]
        self.number = self.index * self.plan.tensor + place[2]
        self.local = dropout == "local"
        self.dropouts = _own_dropouts(model, self.plan, place[2]) if not self.local or self.plan.tensor > 1 else []
        self.module = _divide(model, self.whole, self.plan)
        self.trained = [p.requires_grad for p in model.parameters()]
        self.has_checked_batches = False

    @property
    def entropy(self) -> tuple[int, ...]:
        """Numbers that seed dropout, in addition to the seed and the step."""
        return (self.index,) if self.mesh is not None and self.local else ()

    def micro_batches(
        self, batch: Sequence[Int[Tensor, "B _"]], count: int
    ) -> Iterator[tuple[Int[Tensor, "R _"], ...]]:
        """Yield this process's rows of each micro-batch. If the rows can't be divided equally, padding rows are added.

        Raises:
            ValueError: If parameters were frozen or unfrozen after the model was divided, or the first batches of the
                processes differ.
        """
        if self.mesh is None:
            yield from zip(*(ids.chunk(count) for ids in batch), strict=True)
            return
        if self.trained != [p.requires_grad for p in self.module.parameters()]:
            raise ValueError("the set of frozen parameters of a sharded model must not change; create a new Trainer")
        if not self.has_checked_batches:
            self.check_same("batch", [ids.tolist() for ids in batch])
            self.has_checked_batches = True
        rows = np.arange(len(batch[0]))[:, None]
        own = spread(rows, count, self.plan.shards, -1)[:, self.index, :, 0]  # [count, R], -1 for padding
        first, drawn = (0, own.shape[1]) if self.local else (self.index * own.shape[1], len(rows) // count)
        for dropout in self.dropouts:
            dropout.first, dropout.rows = first, drawn
        padded = [F.pad(ids, (0, 0, 0, 1), value=self.pad_id) for ids in batch]
        for i, each in enumerate(torch.from_numpy(own).to(padded[0].device)):
            # DistributedDataParallel reduces gradients only once, after the last micro-batch. fully_shard reduces them
            # after each micro-batch, because it would otherwise have to store the unsharded gradients.
            waits = i < count - 1 and isinstance(self.module, DistributedDataParallel)
            with self.module.no_sync() if waits else nullcontext():  # type: ignore[operator]
                yield tuple(ids[each] for ids in padded)

    def check_same(self, what: str, value: Any) -> None:
        """Check that all processes have the same value.

        Args:
            what: Name that the error message uses for the value.
            value: Value of this process. The processes compare the ``repr`` of their values.

        Raises:
            ValueError: If the values differ between processes.
        """
        if self.mesh is None:
            return
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, sha256(repr(value).encode()).hexdigest())
        if different := [rank for rank, each in enumerate(found) if each != found[0]]:
            raise ValueError(f"all processes must have the same {what}: process {different[0]} differs")

    def summed(self, x: Float[Tensor, ""] | Int[Tensor, ""]) -> Float[Tensor, ""] | Int[Tensor, ""]:
        """Return the sum of a number over all shards of the batch."""
        if self.mesh is not None:
            for axis in ("data", "fsdp"):
                dist.all_reduce(x, group=self.whole.get_group(axis))
        return x


def _join(kind):
    """Create a process group and wait for the other processes.

    Raises:
        RuntimeError: If not all processes start in time.
    """
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=JOINING))
        store.set(f"process {rank}", "")
        store.wait([f"process {each}" for each in range(size)], JOINING)
    except dist.DistError as error:
        what = f"not all {os.environ['WORLD_SIZE']} processes joined within {JOINING.total_seconds():g} s"
        raise RuntimeError(f"{what}: {str(error).splitlines()[0]}") from error
    store.set_timeout(dist.default_pg_timeout)
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size)


def _check(model, mesh):
    """Check that a mesh can divide a model. Return the plan and the ID of the padding token."""
    if not isinstance(model, Transformer) or is_divided(model):
        raise ValueError(f"the model must not already be wrapped or sharded: got {type(model).__name__}")
    if model.device.type != mesh.device_type:
        raise ValueError(f"the model must be on a {mesh.device_type} device, like the mesh: got {model.device}")
    plan = plan_of(mesh, model.config)
    plan.check_devices(dist.get_world_size(), "include all processes in the mesh")
    return plan, model.config.pad_id


def _with_all_axes(mesh, plan):
    """Return a mesh of the same devices that has all three ``AXES``, in this order. Some axes may have size 1."""
    order = [mesh.mesh_dim_names.index(axis) for axis in AXES if axis in mesh.mesh_dim_names]
    devices = mesh.mesh.permute(order).reshape(plan.data, plan.fsdp, plan.tensor)
    whole = DeviceMesh(mesh.device_type, devices, mesh_dim_names=AXES)
    whole["fsdp", "tensor"]._flatten()  # otherwise, PyTorch warns when it reduces over both axes
    return whole


def _own_dropouts(model, plan, part):
    """Replace dropout layers with layers that use this device's part of a shared mask. Return the new layers."""
    found = []
    for module in [*model.modules()]:
        for name, layer in [*module.named_children()]:
            if isinstance(layer, Dropout):
                axis = DIVIDED_AXES.get(type(module))
                found.append(OwnDropout(layer.p, axis, plan.tensor, part))
                setattr(module, name, found[-1])
    return found


def _divide(model, whole, plan):
    """Divide a model in place and return the module to call. All processes get the first process's weights."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as Placed
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    for parameter in model.parameters():
        parameter.data.copy_(distribute_tensor(parameter.data, whole, [Replicate()] * whole.ndim).to_local())
    if plan.tensor > 1:
        styles = {1: ColwiseParallel, 0: RowwiseParallel}  # style for each axis of a kernel, [in, out]
        axes = {name: tensor_axis(f"{name}.kernel") for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        found = {name: styles[axis]() for name, axis in axes.items() if axis is not None}
        for name, module in model.named_modules():
            if isinstance(module, RelativePositionBias):
                found[name] = ColwiseParallel(output_layouts=Placed(1))  # each device gets the bias of its heads
            if isinstance(module, MultiHeadAttention):  # reduces the gradients of keys and values together
                others = [None] * (3 if "decoder" in name and "self" in name else 2)  # other arguments
                inputs = (Replicate(), Replicate(), *others)
                found[name] = PrepareModuleInput(input_layouts=inputs, desired_input_layouts=inputs)
        parallelize_module(model, whole["tensor"], found)
        for module in model.modules():
            if isinstance(module, MultiHeadAttention):
                module.num_heads //= plan.tensor
    if plan.fsdp == plan.tensor == 1:
        group = whole.get_group("data")
        copies = DistributedDataParallel(model, process_group=group, forward_sync_buffers=False)
        copies.register_comm_hook(group, _sum)
        return copies
    if plan.shards > 1:
        over = whole["data", "fsdp"] if plan.data > 1 else whole["fsdp"]
        for module in (*model.encoder.layers, *model.decoder.layers, model):
            fully_shard(module, mesh=over, reshard_after_forward=True)  # reshard even without a backward pass
            module.set_gradient_divide_factor(1.0)  # submodules don't inherit this setting
            module.set_force_sum_reduction_for_comms(True)
    return model


def _sum(group, bucket):
    """Sum gradients over all processes. DistributedDataParallel's default hook would average them."""
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
