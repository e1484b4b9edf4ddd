"""Training on several devices with TensorFlow's distribution strategies: each device has a copy of the model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np
import tensorflow as tf
from numpy import ndarray

from transformer_spec.checks import random_stream
from transformer_spec.config import TransformerConfig
from transformer_spec.parallel_plan import Plan, Shard, spread
from transformer_spec.shapes import Int
from transformer_tf.runtime import to_device
from transformer_tf.weights import parameters


def make_mesh(plan: Plan, device: str | None = None) -> tf.distribute.Strategy:
    """Return a distribution strategy for a ``Trainer``.

    If ``TF_CONFIG`` is set, the process first joins the other workers.

    Args:
        plan: Number of devices along each axis. Only the ``data`` axis may have more than one device.
        device: ``cpu`` or ``gpu``. If None, GPUs are used if there are any.

    Raises:
        ValueError: If the number of devices doesn't match the plan, or the plan divides parameters.
        RuntimeError: If the device is not visible, or this process can't join the other workers.
    """
    # keras.distribution accepts such layouts but, on TensorFlow, doesn't distribute the variables.
    if plan.fsdp * plan.tensor > 1:
        raise ValueError(f"TensorFlow's strategies support only the axis 'data': got plan {plan}")
    device = to_device(device)
    if os.environ.get("TF_CONFIG"):
        mesh = _joined()
        plan.check_devices(
            mesh.num_replicas_in_sync,
            "list all workers in TF_CONFIG; each worker uses all of its GPUs, or its CPU if it has no GPU",
        )
        return mesh
    gpus = tf.config.list_physical_devices("GPU")
    kind = device[1:4] if device else "GPU" if gpus else "CPU"
    if kind == "CPU":
        _split_cpu(plan.devices)
    devices = [device.name for device in tf.config.list_logical_devices(kind)][: plan.devices]
    plan.check_devices(len(devices), "to split a CPU into devices, create the mesh before you use TensorFlow")
    return _mirrored(tuple(devices))


def plan_of(mesh: Any, config: TransformerConfig) -> Plan:
    """Return the plan of a mesh that ``make_mesh`` or the user created. Without a mesh, return a plan for one device.

    Raises:
        TypeError: If the mesh is not a ``MirroredStrategy`` or ``MultiWorkerMirroredStrategy``.
    """
    if mesh is None:
        return Plan()
    if not isinstance(mesh, tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy):
        needed = "a MirroredStrategy or a MultiWorkerMirroredStrategy"
        raise TypeError(f"mesh must be {needed}: got {type(mesh).__name__}")
    return Plan(data=mesh.num_replicas_in_sync)


def shards(trainer: Any) -> dict[str, list[Shard]]:
    """Return the shards of each parameter on the devices of this process, keyed by canonical name.

    Args:
        trainer: Trainer whose parameters are returned. If the trainer has no mesh, each parameter is one shard.
    """
    mesh, held = trainer.mesh, {}
    devices = (0,)
    if mesh is not None:
        numbers = mesh.experimental_distribute_values_from_function(lambda value: value.replica_id_in_sync_group)
        devices = mesh.experimental_local_results(numbers)
    for name, parameter in parameters(trainer.model).items():
        whole = tuple(slice(0, size) for size in parameter.shape)
        copies = [parameter] if mesh is None else mesh.experimental_local_results(parameter)
        held[name] = [Shard(device, whole, copy.numpy()) for device, copy in zip(devices, copies, strict=True)]
    return held


def check_copies(trainer: Any) -> None:
    """Check that the model and the moments were created in the scope of the trainer's mesh.

    Raises:
        ValueError: If a variable was created in the scope of a different strategy, or outside of any strategy's scope.
    """
    held = [*trainer.optimizer.parameters.values(), *trainer.optimizer.first_moment.values()]
    owners = [v.distribute_strategy if isinstance(v, tf.distribute.DistributedValues) else None for v in held]
    if any(owner is not trainer.mesh for owner in owners):
        raise ValueError(
            "the model must be created in the scope of the trainer's mesh; write `with mesh.scope(): model = ...` "
            "and pass mesh=mesh to the Trainer, or do neither"
        )


def spread_rows(trainer: Any, batch: Sequence[Any], micro_batches: int) -> tuple[Any, ...]:
    """Return a batch for ``call_on_devices``. On a mesh, the shape is [shards, rows, length].

    Raises:
        ValueError: If the first batches, the settings, or the weights of the processes differ.
    """
    if trainer.mesh is None:
        return tuple(batch)
    if not trainer.has_checked_batches and isinstance(trainer.mesh, tf.distribute.MultiWorkerMirroredStrategy):
        given = trainer.step, trainer.seed, trainer.dropout, trainer.settings, trainer.model.config
        check_same(trainer.mesh, "seed, settings, and batch", *given, *(np.asarray(ids).tolist() for ids in batch))
        check_same(trainer.mesh, "weights", *(x.numpy().tobytes() for x in parameters(trainer.model).values()))
        trainer.has_checked_batches = True
    plan, pad_id = trainer.plan, trainer.model.config.pad_id
    # Each array has the shape [micro_batches, shards, R, L].
    parts = [spread(np.asarray(ids), micro_batches, plan.shards, pad_id) for ids in batch]
    return tuple(ids.swapaxes(0, 1).reshape(plan.shards, -1, ids.shape[-1]) for ids in parts)


def check_same(mesh: tf.distribute.Strategy, what: str, *values: Any) -> None:
    """Check that all processes have the same values.

    Raises:
        ValueError: If the values differ between processes.
    """
    digest = sha256(b"".join(value if isinstance(value, bytes) else repr(value).encode() for value in values)).digest()

    def on_device(digest):
        return tf.distribute.get_replica_context().all_gather(digest, axis=0)

    gathered = mesh.run(on_device, (tf.constant([[*digest]]),))
    found, *others = (copy.numpy() for copy in mesh.experimental_local_results(gathered))  # [devices, 32]
    if len(different := np.flatnonzero((found != found[0]).any(1))):
        process = different[0] // (1 + len(others))
        raise ValueError(f"all processes must have the same {what}: process {process} differs")


def random_bits(trainer: Any, sites: int) -> Int[ndarray, "*shards micro_batches sites 2"]:
    """Return the random bits for each dropout layer of a step. On a mesh, return them for each device."""
    shape = trainer.settings.accumulation_steps, sites, 2
    entropy = random_stream(trainer.seed, trainer.step)

    def draw(entropy):
        return np.random.SeedSequence(entropy).generate_state(math.prod(shape)).reshape(shape).astype(np.int64)

    if trainer.mesh is None:
        return draw(entropy)
    shards = range(trainer.plan.shards)
    return np.stack([draw([*entropy, shard] if trainer.dropout == "local" else entropy) for shard in shards])


def summed(trainer: Any, values: Any) -> Any:
    """Sum the loss, the number of tokens, and optionally the gradient over the devices of a mesh."""
    if trainer.mesh is None:
        return values
    context, (total, tokens, *gradient) = tf.distribute.get_replica_context(), values
    tokens = context.all_reduce("SUM", tokens)  # a separate call, because integers are summed on the host
    total, *gradient = context.all_reduce("SUM", [total, *gradient])
    return total, tokens, *gradient


def first_alone(trainer: Any, action: Callable[[], None]) -> None:
    """Call a function in the first process of a mesh, while the other processes wait.

    Raises:
        OSError: If the function fails in the first process.
    """
    mesh = trainer.mesh
    if not isinstance(mesh, tf.distribute.MultiWorkerMirroredStrategy):
        action()
        return
    failed = None
    if mesh.extended.should_checkpoint:
        try:
            action()
        except Exception as error:
            failed = error

    def on_device(problems):
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.identity(problems))

    problems = mesh.run(on_device, (tf.constant(float(failed is not None)),))
    if failed is not None:
        raise failed
    if float(mesh.experimental_local_results(problems)[0]):
        raise OSError("the first process cannot write the directory; see the error message of that process")


def _joined():
    """Join the other workers.

    TensorFlow waits for them without a timeout, and ignores Ctrl-C while it waits.

    Raises:
        RuntimeError: If this process can't listen on its address.
    """
    try:
        return _multi_worker()
    except tf.errors.UnknownError as error:
        raise RuntimeError(f"this worker cannot listen on its address in TF_CONFIG: {error}") from error


# If two strategies used the same devices, TensorFlow would mix up their collectives, so each strategy is created only
# once.
_mirrored = cache(tf.distribute.MirroredStrategy)
_multi_worker = cache(tf.distribute.MultiWorkerMirroredStrategy)


def _split_cpu(count):
    """Split the CPU into several logical devices, unless it is already split or TensorFlow is already in use."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or [cpu]) < count:
        with suppress(RuntimeError):
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
