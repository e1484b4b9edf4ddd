"""Training on several devices, by TensorFlow's strategies: each holds the whole model and has rows of its own."""

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

from transformer_spec.config import TransformerConfig
from transformer_spec.parallel_plan import Plan, Shard, spread
from transformer_spec.shapes import Int
from transformer_tf.runtime import to_device
from transformer_tf.weights import parameters


def make_mesh(plan: Plan, device: str | None = None) -> tf.distribute.Strategy:
    """Return the devices of a plan as the framework arranges them, for a ``Trainer``.

    Args:
        plan: How many devices there are along each axis.
        device: ``cpu`` or ``gpu``. None leaves the place to the framework.

    Raises:
        ValueError: There is another number of devices than the plan needs, or the framework cannot follow the plan.
        RuntimeError: The device is not visible.
    """
    # keras.distribution accepts such layouts and, on TensorFlow, leaves every variable where it is.
    if plan.fsdp * plan.tensor > 1:
        raise ValueError(f"TensorFlow's strategies divide the rows of a batch only, by data=N: got {plan}")
    device = to_device(device)
    if os.environ.get("TF_CONFIG"):
        mesh = _joined()
        plan.check_devices(mesh.num_replicas_in_sync, "TF_CONFIG lists the workers, each with a GPU or its CPU")
        return mesh
    gpus = tf.config.list_physical_devices("GPU")
    kind = device[1:4] if device else "GPU" if gpus else "CPU"
    if kind == "CPU":
        _split_cpu(plan.devices)
    devices = [device.name for device in tf.config.list_logical_devices(kind)][: plan.devices]
    plan.check_devices(len(devices), "make the mesh before anything else of TensorFlow, to split a CPU into several")
    return _mirrored(tuple(devices))


def plan_of(mesh: Any, config: TransformerConfig) -> Plan:
    """Return the plan that a mesh follows, be it from ``make_mesh`` or the user's own; one device for None.

    Raises:
        TypeError: That is no mesh of this framework.
        ValueError: The mesh has an axis that is none of a plan's, or the model cannot be divided like this.
    """
    if mesh is None:
        return Plan()
    if not isinstance(mesh, tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy):
        needed = "a MirroredStrategy or a MultiWorkerMirroredStrategy"
        raise TypeError(f"mesh must be {needed}: got {type(mesh).__name__}")
    return Plan(data=mesh.num_replicas_in_sync)


def shards(trainer: Any) -> dict[str, list[Shard]]:
    """Return what the devices of this process hold of each parameter of a trainer, by canonical name."""
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
    """Refuse a model, or moments, with other copies than the trainer's mesh has: one each without.

    Raises:
        ValueError: A variable was made in the scope of another strategy, or of none.
    """
    held = [*trainer.optimizer.parameters.values(), *trainer.optimizer.first_moment.values()]
    owners = [v.distribute_strategy if isinstance(v, tf.distribute.DistributedValues) else None for v in held]
    if any(owner is not trainer.mesh for owner in owners):
        raise ValueError(
            "a model is trained on the devices it was made for: build it in the scope of the mesh (with mesh.scope(): "
            "model = ...) and pass mesh=mesh to the Trainer, or do neither"
        )


def spread_rows(trainer: Any, batch: Sequence[Any], slices: int) -> tuple[Any, ...]:
    """Return a batch as ``call_on_devices`` takes it: on a mesh, the rows of each share, [shares, rows, length].

    Raises:
        ValueError: Each process has a batch of its own, or other settings or weights; the first batch tells.
    """
    if trainer.mesh is None:
        return tuple(batch)
    if not trainer.has_checked_batches and isinstance(trainer.mesh, tf.distribute.MultiWorkerMirroredStrategy):
        given = trainer.step, trainer.seed, trainer.dropout, trainer.settings, trainer.model.config
        check_same(trainer.mesh, "seed, settings and batch", *given, *(np.asarray(ids).tolist() for ids in batch))
        check_same(trainer.mesh, "weights", *(x.numpy().tobytes() for x in parameters(trainer.model).values()))
        trainer.has_checked_batches = True
    plan, pad_id = trainer.plan, trainer.model.config.pad_id
    parts = [spread(np.asarray(ids), slices, plan.shares, pad_id) for ids in batch]  # [slices, shares, R, L]
    return tuple(ids.swapaxes(0, 1).reshape(plan.shares, -1, ids.shape[-1]) for ids in parts)


def check_same(mesh: tf.distribute.Strategy, what: str, *values: Any) -> None:
    """Refuse a run whose processes were not given the same.

    Raises:
        ValueError: They were not.
    """
    digest = sha256(b"".join(value if isinstance(value, bytes) else repr(value).encode() for value in values)).digest()

    def on_device(digest):
        return tf.distribute.get_replica_context().all_gather(digest, axis=0)

    gathered = mesh.run(on_device, (tf.constant([[*digest]]),))
    found, *others = (copy.numpy() for copy in mesh.experimental_local_results(gathered))  # [devices, 32]
    if len(different := np.flatnonzero((found != found[0]).any(1))):
        process = different[0] // (1 + len(others))
        raise ValueError(f"all processes must have the same {what}: got others in process {process}")


def random_bits(trainer: Any, sites: int) -> Int[ndarray, "*shares slices sites 2"]:
    """Return what the dropout of a step depends on, at each of its sites; on a mesh, for each share."""
    shape = trainer.settings.accumulation_steps, sites, 2
    entropy = [trainer.seed, trainer.step]

    def draw(entropy):
        return np.random.SeedSequence(entropy).generate_state(math.prod(shape)).reshape(shape).astype(np.int64)

    if trainer.mesh is None:
        return draw(entropy)
    shares = range(trainer.plan.shares)
    return np.stack([draw([*entropy, share] if trainer.dropout == "local" else entropy) for share in shares])


def summed(trainer: Any, values: Any) -> Any:
    """Return the sums of what the devices of a mesh have found of a loss, its tokens and, perhaps, its gradient."""
    if trainer.mesh is None:
        return values
    context, (total, tokens, *gradient) = tf.distribute.get_replica_context(), values
    tokens = context.all_reduce("SUM", tokens)  # on its own: integers are summed on the host
    total, *gradient = context.all_reduce("SUM", [total, *gradient])
    return total, tokens, *gradient


def first_alone(trainer: Any, action: Callable[[], None]) -> None:
    """Let the first process of a mesh do something, while the others wait.

    Raises:
        OSError: The first process could not do it.
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
        raise OSError("the first process cannot write the folder, and says why")


def _joined():
    """Join the other workers. TensorFlow waits for them permanently, and Ctrl-C doesn't end the process meanwhile.

    Raises:
        RuntimeError: This process cannot listen at its address.
    """
    try:
        return _multi_worker()
    except tf.errors.UnknownError as error:
        raise RuntimeError(f"TF_CONFIG: the address of this worker is in use, or not its own: {error}") from error


# The collectives of two strategies of the same devices would take each other's tensors: there is one of each.
_mirrored = cache(tf.distribute.MirroredStrategy)
_multi_worker = cache(tf.distribute.MultiWorkerMirroredStrategy)


def _split_cpu(count):
    """Take the CPU for so many devices, unless it is already; once TensorFlow has begun, it stays as it is."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or [cpu]) < count:
        with suppress(RuntimeError):
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
