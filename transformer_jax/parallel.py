"""Training on several devices with a mesh, over which JAX distributes arrays and computations.

The trainer shards the model's arrays. You can still call the model. If the arrays are sharded over several processes,
call the model under ``nnx.jit``, because operations that are dispatched one by one can deadlock on CPUs. Dropout is
always ``global``, which takes no extra time. By default (``jax_threefry_partitionable``), random bits depend only on
their position in the mask, so each device generates only the bits for its part. ``local`` has the same effect as
``global``.

Axes: B batch, L length.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.optimizer import Arrays
from transformer_jax.runtime import check_placement, to_numpy
from transformer_jax.weights import parameter_of
from transformer_spec.config import TransformerConfig
from transformer_spec.names import parameter_shapes
from transformer_spec.parallel_plan import AXES, Plan, Shard, fsdp_axis, spread, tensor_axis

KEYS = ("num_processes", "process_id")
MORE_DEVICES = (
    "to split a CPU into N devices, call jax.config.update('jax_num_cpu_devices', N) before JAX is used; "
    "to add the devices of other processes, call jax.distributed.initialize"
)


def make_mesh(plan: Plan, device: str | None = None) -> Mesh:
    """Return a ``jax.sharding.Mesh`` for a ``Trainer``.

    If ``JAX_COORDINATOR_ADDRESS`` is set, the process first joins the other processes via
    ``jax.distributed.initialize``.

    Args:
        plan: Number of devices along each axis.
        device: ``cpu``, ``gpu``, or ``tpu``. If None, JAX's default platform is used.

    Raises:
        ValueError: If the number of devices doesn't match the plan, or the platform is unknown.
        RuntimeError: If the device is not visible, or multiple processes on CPUs dispatch asynchronously.
    """
    _join()
    check_placement("float32", device)
    devices = jax.devices(device)
    if jax.process_count() == 1:
        devices = devices[: plan.devices]
    elif devices[0].platform == "cpu" and jax.config.values.get("jax_cpu_enable_async_dispatch"):
        raise RuntimeError(
            "multiple processes on CPUs must not dispatch asynchronously, because they can deadlock; call "
            "jax.config.update('jax_cpu_enable_async_dispatch', False) before JAX is used"
        )
    plan.check_devices(len(devices), MORE_DEVICES)
    sizes = {axis: size for axis in AXES if (size := getattr(plan, axis)) > 1} or {"data": 1}
    return jax.make_mesh((*sizes.values(),), (*sizes,), (AxisType.Auto,) * len(sizes), devices=devices)


def plan_of(mesh: Any, config: TransformerConfig) -> Plan:
    """Return the plan of a mesh that ``make_mesh`` or the user created. Without a mesh, return a plan for one device.

    Raises:
        TypeError: If the mesh is not a ``jax.sharding.Mesh``.
        ValueError: If the mesh has an unknown axis, or can't divide the model.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh: got {type(mesh).__name__}")
    plan = Plan() if mesh is None else Plan.of_axes(mesh.shape)
    plan.check(config)
    return plan


def shards(trainer: Any) -> dict[str, list[Shard]]:
    """Return the shards of each parameter on the devices of this process, keyed by canonical name.

    Args:
        trainer: Trainer whose parameters are returned. If the trainer has no mesh, each parameter is one shard.
    """
    numbers, held = _numbers(trainer.mesh), {}
    for name in parameter_shapes(trainer.model.config):
        array = parameter_of(trainer.model, name).get_value()
        held[name] = [
            Shard(numbers.get(part.device, 0), _bounded(part.index, array.shape), np.array(part.data))
            for part in array.addressable_shards
        ]
    return held


def divide(trainer: Any, batch: Sequence[Array], micro_batches: int) -> Sequence[Array]:
    """Return a batch whose rows are divided among the devices of a mesh.

    The shape is [rows, L], or [micro_batches, rows, L] if there are multiple micro-batches.

    Raises:
        ValueError: If the first batches or the settings of the processes differ.
    """
    if trainer.mesh is None:
        return batch
    if not trainer.has_checked_batches:
        given = trainer.step, trainer.seed, trainer.settings, trainer.model.config
        check_same("seed, settings, and batch", *given, *(np.asarray(ids).tolist() for ids in batch))
        trainer.has_checked_batches = True
    sharding = _sharding(trainer.mesh, [None] * (micro_batches > 1) + [_rows(trainer.mesh)])
    divided = []
    for ids in batch:
        parts = spread(np.asarray(ids), micro_batches, trainer.plan.shards, trainer.model.config.pad_id)
        parts = parts.reshape(*[micro_batches] * (micro_batches > 1), -1, ids.shape[1])
        # Every process has the full batch, but creates shards only for its own devices.
        divided.append(jax.make_array_from_callback(parts.shape, sharding, parts.__getitem__))
    return tuple(divided)


def shardings(config: TransformerConfig, mesh: Mesh | None) -> dict[str, NamedSharding] | None:
    """Return the sharding of each parameter, its moments, and its gradient. Without a mesh, return None."""
    if mesh is None:
        return None
    return {name: _sharding(mesh, _axes(name, shape, mesh)) for name, shape in parameter_shapes(config).items()}


def place(parameters: Arrays, wanted: dict[str, NamedSharding] | None) -> Arrays:
    """Commit parameters to the devices of a mesh. Without a mesh, commit them to their current devices."""
    if wanted is None or jax.process_count() == 1:
        return {
            name: jax.device_put(array, array.sharding if wanted is None else wanted[name])
            for name, array in parameters.items()
        }
    # Data is not sent between processes, because each process has the full arrays.
    whole = {name: to_numpy(array) for name, array in parameters.items()}
    check_same("weights", *(array.tobytes() for array in whole.values()))
    return {
        name: jax.make_array_from_callback(array.shape, wanted[name], array.__getitem__)
        for name, array in whole.items()
    }


def check_same(what: str, *values: Any) -> None:
    """Check that all processes have the same values.

    Raises:
        ValueError: If the values differ between processes.
    """
    if jax.process_count() == 1:
        return
    digest = sha256(b"".join(value if isinstance(value, bytes) else repr(value).encode() for value in values)).digest()
    found = process_allgather(np.frombuffer(digest, np.uint8))  # [processes, 32]
    if len(different := np.flatnonzero((found != found[0]).any(1))):
        raise ValueError(f"all processes must have the same {what}: process {different[0]} differs")


def constrain(arrays: Arrays, mesh: Mesh | None, *, gathered: bool = False) -> Arrays:
    """Shard traced parameters, or arrays of the same shapes, as the mesh specifies.

    Args:
        arrays: Arrays, keyed by canonical name.
        mesh: Mesh. If None, the arrays are returned unchanged.
        gathered: If True, the axis that ``fsdp`` divides is gathered.
    """
    if mesh is None:
        return arrays
    # Without these constraints, XLA may shard a matmul differently: it may gather the activations and let each device
    # compute a part of every sum in the matmul.
    return {
        name: jax.lax.with_sharding_constraint(array, _sharding(mesh, _axes(name, array.shape, mesh, gathered)))
        for name, array in arrays.items()
    }


def _join():
    """Join the other processes that the environment variables specify, unless this process has already done so."""
    if "JAX_COORDINATOR_ADDRESS" not in os.environ or jax.distributed.is_initialized():
        return
    # If Slurm or Open MPI has started the processes, JAX finds the missing values.
    given: dict[str, Any] = {key: int(os.environ[name]) for key in KEYS if (name := f"JAX_{key.upper()}") in os.environ}
    if given.get("process_id") == 0:
        _check_port(os.environ["JAX_COORDINATOR_ADDRESS"])
    jax.distributed.initialize(**given, initialization_timeout=60, heartbeat_timeout_seconds=30)


def _check_port(address):
    """Check that no other program uses the address, because JAX's coordinator would end this process without a message.

    Raises:
        RuntimeError: If the address is in use.
    """
    with socket.socket() as coordinator:
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            coordinator.bind(("", int(address.rpartition(":")[2])))
        except OSError as error:
            raise RuntimeError(f"JAX_COORDINATOR_ADDRESS={address}: {error.strerror}") from error


def _axes(name, shape, mesh, gathered=False):
    """For each axis of a parameter, return the mesh axis that divides it, or None."""
    axes: list[str | None] = [None] * len(shape)
    if not gathered and "fsdp" in mesh.shape and (axis := fsdp_axis(name, shape, mesh.shape["fsdp"])) is not None:
        axes[axis] = "fsdp"
    if "tensor" in mesh.shape and (axis := tensor_axis(name)) is not None:
        axes[axis] = "tensor"
    return axes


def _rows(mesh):
    """Return the mesh axes that divide the rows of a batch."""
    return tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape)


def _sharding(mesh, axes):
    # Copy the mesh with automatic axes, because the axes of jax.make_mesh are explicit by default.
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), PartitionSpec(*axes))


def _numbers(mesh):
    """Return the index of each device in the mesh, in row-major order of the axes data, fsdp, and tensor."""
    if mesh is None:
        return {}
    order = [mesh.axis_names.index(axis) for axis in AXES if axis in mesh.shape]
    return {device: number for number, device in enumerate(mesh.devices.transpose(order).flat)}


def _bounded(index, shape):
    """Return an index in which every slice has an explicit start and stop."""
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))
