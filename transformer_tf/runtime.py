"""Dtypes, devices, precision settings, and input checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.checks import check_choice, check_ids, check_mask, check_memory, to_array
from transformer_spec.shapes import Bool, Float, Int

DTYPES = ("float64", "float32", "bfloat16")
DEVICES = ("cpu", "gpu")
DEVICE_NAME = re.compile(r"(?:/job:localhost/replica:0/task:0)?/?(?:(?:physical_)?device:)?(cpu|gpu)(?::(\d+))?")
PRECISIONS = ("highest", "fast")

_COMPILES_QUICKLY = ContextVar("compiles quickly", default=False)


def set_precision(precision: str) -> None:
    """Set the precision of float32 matmuls for the whole process.

    Args:
        precision: With ``highest``, matmuls are computed in full float32, so that results agree across frameworks. With
            ``fast``, matmuls on a GPU may use TF32, which is faster than float32. Most CPUs compute in full float32
            with both settings.

    Raises:
        ValueError: If the precision is unknown.
    """
    check_choice("precision", precision, PRECISIONS)
    tf.config.experimental.enable_tensor_float_32_execution(precision == "fast")


def check_placement(dtype: Any, device: Any) -> None:
    """Check that this package supports a dtype policy, and that a device is available.

    Raises:
        ValueError: If the dtype or the device is unknown.
        RuntimeError: If the device is not visible.
    """
    to_policy(dtype)
    to_device(device)


def to_policy(dtype: Any) -> str:
    """Return the name of a dtype policy.

    Args:
        dtype: One of ``DTYPES`` or ``mixed_bfloat16``; a ``keras.DTypePolicy``; a dtype of TensorFlow or NumPy.

    Raises:
        ValueError: If the dtype is unknown.
    """
    name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    if name != "mixed_bfloat16":
        check_choice("dtype", name, DTYPES)
    return name


def to_device(device: Any) -> str | None:
    """Return a TensorFlow device name, such as ``/GPU:0``. None, which means the caller's scope, is returned unchanged.

    Args:
        device: ``cpu`` or ``gpu`` (with or without a number), a TensorFlow device or its name, or None.

    Raises:
        ValueError: If the type of device is unknown.
        RuntimeError: If the device is not visible.
    """
    if device is None:
        return None
    match = DEVICE_NAME.fullmatch(str(getattr(device, "name", device)).lower())
    if match is None:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}: got {device!r}")
    kind, number = match[1].upper(), int(match[2] or 0)
    if kind == "GPU" and not tf.config.list_physical_devices(kind):
        raise RuntimeError(f"no GPU is visible to tensorflow {tf.__version__}")
    if number and number >= len(tf.config.list_logical_devices(kind)):
        raise RuntimeError(f"no {kind}:{number} is visible to tensorflow {tf.__version__}")
    return f"/{kind}:{number}"


def placed(device: str | None) -> AbstractContextManager[Any]:
    """Return a context that runs operations on a device. If None, the caller's scope is used."""
    return nullcontext() if device is None else tf.device(device)


def as_placed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of a model so that it runs on the model's device."""

    @wraps(method)
    def run(model: Any, *args: Any, **options: Any) -> Any:
        with placed(model.device):
            return method(model, *args, **options)

    return run


def to_ids(name: str, ids: Any, vocab_size: int, max_positions: int | None) -> Int[Tensor, "B L"]:
    """Check the token IDs that a caller passed, and return them as a tensor.

    Values are checked only if they can be read without delay: on a CPU and outside of traced code. Otherwise, for an ID
    outside the vocabulary, TensorFlow returns zeros on a GPU, and XLA reads the nearest row.
    """
    if isinstance(ids, tf.RaggedTensor | tf.SparseTensor):
        kind = type(ids).__name__
        raise TypeError(f"{name} must be padded: got a {kind}; convert it with {name}.to_tensor(config.pad_id)")
    if keras.backend.is_keras_tensor(ids):
        raise TypeError(
            f"{name} must contain values: got a keras.Input, which is supported only when you call a Transformer, "
            "Encoder, or Decoder"
        )
    if tf.is_tensor(ids):
        ids = tf.convert_to_tensor(ids)  # the IDs may be a variable
        on_host = "CPU" in getattr(ids, "backing_device", "CPU")  # traced tensors have no device
        values = tf.get_static_value(ids) if on_host else None
        check_ids(name, tuple(ids.shape), ids.dtype.name, vocab_size, max_positions, values)
    else:
        ids = to_array(name, ids)
        check_ids(name, ids.shape, ids.dtype.name, vocab_size, max_positions, ids)
    return tf.cast(ids, tf.int32)


def to_mask(name: str, mask: Any, shape: tuple[int | None, int | None]) -> Bool[Tensor, "B L"]:
    """Check that a padding mask is boolean and has the same shape as the IDs, and return it."""
    mask = mask if tf.is_tensor(mask) else to_array(name, mask)
    check_mask(name, tuple(mask.shape), mask.dtype.name, shape)
    return tf.convert_to_tensor(mask)


def to_memory(memory: Any, shape: tuple[int | None, ...], dtype: str) -> Float[Tensor, "B S d_model"]:
    """Check that an encoder memory has the expected shape and dtype, and return it."""
    memory = memory if tf.is_tensor(memory) else np.asarray(memory)
    check_memory(tuple(memory.shape), memory.dtype.name, shape, dtype)
    return tf.convert_to_tensor(memory)


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Disable compilation within this context, for example in tests and short programs.

    A search and a ``Trainer`` without a mesh run eagerly, so they don't wait for TensorFlow to trace or for XLA to
    compile. However, each call takes longer than a compiled call. Results agree up to rounding.
    """
    token = _COMPILES_QUICKLY.set(True)
    try:
        yield
    finally:
        _COMPILES_QUICKLY.reset(token)


def compiles_quickly() -> bool:
    """Return whether the caller is inside a ``quick_compilation`` context."""
    return _COMPILES_QUICKLY.get()


def describe() -> dict[str, str]:
    """Return the current versions, devices, number of threads, and precision settings as text for reports."""
    gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
    return {
        "version": f"{tf.__version__}, keras {keras.__version__}",
        "device": ", ".join(gpus) or "cpu",
        "threads": str(tf.config.threading.get_intra_op_parallelism_threads() or "all"),
        "TF32": str(tf.config.experimental.tensor_float_32_execution_enabled()),
    }
