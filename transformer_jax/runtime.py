"""The machine: dtypes, devices and precision by name, and the way in for ids and masks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental.multihost_utils import process_allgather

from transformer_spec.checks import check_choice, check_ids, check_mask, check_memory, to_array
from transformer_spec.search_rules import SearchRules
from transformer_spec.shapes import Bool, Float, Int

jax.tree_util.register_static(SearchRules)  # rules are no arrays: what is compiled depends on them

DTYPES = ("float64", "float32", "bfloat16")
DEVICES = ("cpu", "gpu", "tpu")
PRECISIONS = ("highest", "fast")
MATMUL_PRECISION = {"highest": "highest", "fast": "tensorfloat32"}  # by JAX's names

_COMPILES_QUICKLY = ContextVar("compiles quickly", default=False)


def set_precision(precision: str) -> None:
    """Choose how float32 matrix products are computed, for the whole process.

    Args:
        precision: ``highest`` computes in full float32, for agreement; ``fast`` allows fewer bits of mantissa
            (TF32 on a GPU), for speed. Most CPUs compute in full float32 either way.

    Raises:
        ValueError: There is no such precision.
    """
    check_choice("precision", precision, PRECISIONS)
    jax.config.update("jax_default_matmul_precision", MATMUL_PRECISION[precision])


def check_placement(dtype: Any, device: Any) -> None:
    """Raise the errors of ``to_dtype`` and ``to_device``."""
    to_dtype(dtype)
    to_device(device)


def to_dtype(dtype: Any) -> str:
    """Return the name of a dtype, given that or the dtype itself.

    Raises:
        ValueError: If it is not one of ``DTYPES``.
    """
    try:
        name: Any = dtype if isinstance(dtype, str | None) else np.dtype(dtype).name
    except TypeError:
        name = dtype
    check_choice("dtype", name, DTYPES)
    return name


def to_device(device: Any) -> jax.Device | None:
    """Return a device, given that or its platform; None is JAX's default device.

    Raises:
        ValueError: If there is no such platform.
        RuntimeError: If the device is not visible.
    """
    if device is None:
        return jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(device, jax.Device):
        return device
    check_choice("device", device, DEVICES)
    try:
        return jax.local_devices(backend=device)[0]  # each process has its own
    except RuntimeError as error:
        raise RuntimeError(f"no {device.upper()} is visible to jax {jax.__version__}") from error


def to_rngs(rngs: Any) -> nnx.Rngs:
    """Return random streams, given those, a key or a seed.

    Raises:
        TypeError: If it is something else.
    """
    if not isinstance(rngs, nnx.Rngs | Array | int | np.integer) or isinstance(rngs, bool):
        raise TypeError(f"rngs must be an nnx.Rngs, a key or a seed: got {type(rngs).__name__}")
    if isinstance(rngs, nnx.Rngs):
        return rngs
    return nnx.Rngs(rngs if isinstance(rngs, Array) else int(rngs))


def as_placed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of a model multiply in the model's precision, and create arrays where the model is."""

    @wraps(method)
    def run(model: Any, *args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            if model.precision is not None:
                stack.enter_context(jax.default_matmul_precision(MATMUL_PRECISION[model.precision]))
            if (device := model.device) is not None:
                stack.enter_context(jax.default_device(device))
            return method(model, *args, **options)

    return run


def as_array(name: str, value: Any) -> Any:
    """Return an array of JAX, which may be traced, unchanged; anything else as an array of NumPy, see ``to_array``."""
    return value if isinstance(value, Array) else to_array(name, value)


def to_ids(name: str, ids: Any, vocab_size: int, max_positions: int | None) -> Int[Array, "B L"]:
    """Take token ids from the outside, checked.

    Their values are looked at where that is free: not on a GPU, nor where code is traced. What a bad id means there is
    up to the framework: torch stops, TensorFlow stops on a CPU and takes zeros on a GPU, XLA takes the nearest row; but
    JAX counts negative ids from the end.
    """
    ids = as_array(name, ids)
    values = _values(ids) if isinstance(ids, Array) else ids
    check_ids(name, ids.shape, ids.dtype.name, vocab_size, max_positions, values)
    return jnp.asarray(ids.astype(np.int32))  # a copy: the caller's array is never aliased


def to_mask(name: str, mask: Any, shape: tuple[int, int]) -> Bool[Array, "B L"]:
    """Take a padding mask from the outside, checked against the shape of its ids."""
    mask = as_array(name, mask)
    check_mask(name, mask.shape, mask.dtype.name, shape)
    return jnp.array(mask)  # a copy: the caller's array is never aliased


def to_memory(memory: Any, shape: tuple[int, ...], dtype: str) -> Float[Array, "B S d_model"]:
    """Take a memory from the outside, checked against the shape of its source and the model's dtype."""
    memory = as_array("memory", memory)
    check_memory(memory.shape, memory.dtype.name, shape, dtype)
    return jnp.array(memory)  # a copy: the caller's array is never aliased


def to_numpy(array: Array) -> np.ndarray:
    """Copy an array out of its devices, also of other processes, all of which must call this."""
    return np.array(array) if array.is_fully_addressable else process_allgather(array, tiled=True)


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Compile with few optimizations within this context: for a test, and for any program that runs only briefly.

    A search and ``gradients`` compile as the context of the call says, and a ``Trainer`` as the context in which it was
    constructed. Compilation takes a fifth of the usual time, and the compiled code runs more slowly. Results agree up
    to rounding.
    """
    token = _COMPILES_QUICKLY.set(True)
    try:
        yield
    finally:
        _COMPILES_QUICKLY.reset(token)


def compiler_options() -> dict[str, Any]:
    """Return the options for ``jax.jit`` that hold in this context: none by default, and those of a quick compilation.

    Code that compiles a model by itself can pass them to ``jax.jit`` to follow ``quick_compilation`` too.
    """
    return dict(_quick_options()) if _COMPILES_QUICKLY.get() else {}


def describe() -> dict[str, str]:
    """Return versions, devices, threads and precision switches, as they are now."""
    return {
        "version": f"{jax.__version__}, flax {flax.__version__}",
        "device": ", ".join(device.device_kind for device in _gpus()) or "cpu",
        "threads": str(os.cpu_count()),  # XLA takes what there is
        "matrix products": jax.config.jax_default_matmul_precision or "default",  # type: ignore[attr-defined]
        "float64": "on" if jax.config.jax_enable_x64 else "off until asked for",  # type: ignore[attr-defined]
    }


@cache
def _quick_options():
    options = {"xla_backend_optimization_level": 0}
    # A release of XLA may lack these internal switches. XLA does not divide a small program into parts.
    for name, value in (("xla_cpu_use_fusion_emitters", False), ("xla_cpu_parallel_codegen_split_count", 1)):
        with suppress(ValueError, RuntimeError):
            jax.jit(lambda x: x, compiler_options={name: value})(0.0)
            options[name] = value
    return options


def _values(ids: Array) -> np.ndarray | None:
    """Return the values of ids where that is free: on a CPU, where nothing is traced."""
    if isinstance(ids, jax.core.Tracer) or any(device.platform != "cpu" for device in ids.devices()):
        return None
    return np.asarray(ids) if ids.is_fully_addressable else None


def _gpus() -> list[jax.Device]:
    return [device for device in jax.devices() if device.platform == "gpu"]
