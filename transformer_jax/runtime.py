"""Dtypes, devices, precision settings, and input checks."""

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

jax.tree_util.register_static(SearchRules)  # search rules are constants of the compiled code

DTYPES = ("float64", "float32", "bfloat16")
DEVICES = ("cpu", "gpu", "tpu")
PRECISIONS = ("highest", "fast")
MATMUL_PRECISION = {"highest": "highest", "fast": "tensorfloat32"}  # names in JAX

_COMPILES_QUICKLY = ContextVar("compiles quickly", default=False)
# Some releases of XLA lack these options. With a split count of 1, XLA doesn't split the program to compile its parts
# in parallel.
_INTERNAL_OPTIONS: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


def set_precision(precision: str) -> None:
    """Set the precision of float32 matmuls for the whole process.

    Args:
        precision: With ``highest``, matmuls are computed in full float32, so that results agree across frameworks. With
            ``fast``, matmuls may use fewer mantissa bits (TF32 on a GPU), which is faster. Most CPUs compute in full
            float32 with both settings.

    Raises:
        ValueError: If the precision is unknown.
    """
    check_choice("precision", precision, PRECISIONS)
    jax.config.update("jax_default_matmul_precision", MATMUL_PRECISION[precision])


def check_placement(dtype: Any, device: Any) -> None:
    """Check that this package supports a dtype, and that a device is available.

    Raises:
        ValueError: If the dtype or the device is unknown.
        RuntimeError: If the device is not visible.
    """
    to_dtype(dtype)
    to_device(device)


def check_float64(dtype: str) -> None:
    """Raise a RuntimeError if the dtype is float64 and JAX would replace it with float32."""
    if dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined, unused-ignore]
        raise RuntimeError("float64 is disabled in JAX; call jax.config.update('jax_enable_x64', True)")


def to_dtype(dtype: Any) -> str:
    """Return the name of a dtype, given a dtype of JAX or NumPy, or its name.

    Raises:
        ValueError: If the dtype is not one of ``DTYPES``.
    """
    try:
        name: Any = dtype if isinstance(dtype, str | None) else np.dtype(dtype).name
    except TypeError:
        name = dtype
    check_choice("dtype", name, DTYPES)
    return name


def to_device(device: Any) -> jax.Device | None:
    """Return a device, given a device or a platform. If None, return JAX's default device.

    Raises:
        ValueError: If the platform is unknown.
        RuntimeError: If the device is not visible.
    """
    if device is None:
        return jax.config.jax_default_device  # type: ignore[attr-defined, unused-ignore]
    if isinstance(device, jax.Device):
        return device
    check_choice("device", device, DEVICES)
    try:
        return jax.local_devices(backend=device)[0]  # the first device of this process
    except RuntimeError as error:
        raise RuntimeError(f"no {device.upper()} is visible to jax {jax.__version__}") from error


def to_rngs(rngs: Any) -> nnx.Rngs:
    """Return an ``nnx.Rngs``, given an ``nnx.Rngs``, a key, or a seed.

    Raises:
        TypeError: If the argument has a different type.
    """
    if not isinstance(rngs, nnx.Rngs | Array | int | np.integer) or isinstance(rngs, bool):
        raise TypeError(f"rngs must be an nnx.Rngs, a key, or a seed: got {type(rngs).__name__}")
    if isinstance(rngs, nnx.Rngs):
        return rngs
    return nnx.Rngs(rngs if isinstance(rngs, Array) else int(rngs))


def as_placed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of a model so that it uses the model's matmul precision and device."""

    @wraps(method)
    def run(model: Any, *args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            if model.precision is not None:
                check_choice("precision", model.precision, PRECISIONS)
                stack.enter_context(jax.default_matmul_precision(MATMUL_PRECISION[model.precision]))
            if (device := model.device) is not None:
                stack.enter_context(jax.default_device(device))
            return method(model, *args, **options)

    return run


def as_array(name: str, value: Any) -> Any:
    """Return a JAX array unchanged, even if it is traced. Convert any other value to a NumPy array."""
    return value if isinstance(value, Array) else to_array(name, value)


def to_ids(name: str, ids: Any, vocab_size: int, max_positions: int | None) -> Int[Array, "B L"]:
    """Check the token IDs that a caller passed, and return them as an array.

    Values are checked only if they can be read without delay: on a CPU and outside of traced code. Otherwise, XLA
    clamps an ID outside the vocabulary to the last row, and JAX counts negative IDs from the end.
    """
    ids = as_array(name, ids)
    values = _values(ids) if isinstance(ids, Array) else ids
    check_ids(name, ids.shape, ids.dtype.name, vocab_size, max_positions, values)
    return jnp.asarray(ids.astype(np.int32))  # copy, so that the caller's array is never aliased


def to_mask(name: str, mask: Any, shape: tuple[int, int]) -> Bool[Array, "B L"]:
    """Check that a padding mask is boolean and has the same shape as the IDs, and return it."""
    mask = as_array(name, mask)
    check_mask(name, mask.shape, mask.dtype.name, shape)
    return jnp.array(mask)  # copy, so that the caller's array is never aliased


def to_memory(memory: Any, shape: tuple[int, ...], dtype: str) -> Float[Array, "B S d_model"]:
    """Check that an encoder memory has the expected shape and dtype, and return it."""
    memory = as_array("memory", memory)
    check_memory(memory.shape, memory.dtype.name, shape, dtype)
    return jnp.array(memory)  # copy, so that the caller's array is never aliased


def to_rows(rows: Any, hypotheses: int, sequences: int) -> Int[Array, " R"]:
    """Check the row indices that select the new hypotheses of a cache, and return them as an array.

    A cache stores the encoder memory once per sequence, so each row must contain a hypothesis of the same sequence. The
    number of hypotheses per sequence may change. Values are checked only if they can be read without delay.
    """
    rows = as_array("rows", rows)
    values = _values(rows) if isinstance(rows, Array) else rows
    if values is not None:
        places = np.arange(len(values))
        if len(values) % sequences:
            raise ValueError(f"rows must contain the same number of rows for {sequences} sequences: got {len(values)}")
        before, after = (count // sequences for count in (hypotheses, len(values)))
        if moved := np.flatnonzero(values // before != places // after).tolist():
            raise ValueError(
                f"rows must replace each hypothesis with a hypothesis of the same sequence: got row {values[moved[0]]} "
                f"of sequence {values[moved[0]] // before} for sequence {moved[0] // after}; to reorder sequences, "
                "create a new cache"
            )
    return jnp.asarray(rows)


def to_numpy(array: Array) -> np.ndarray:
    """Copy an array to the host. If it is sharded over several processes, all of them must call this function."""
    is_local = not isinstance(array, Array) or array.is_fully_addressable  # a model's state may contain NumPy arrays
    return np.array(array) if is_local else process_allgather(array, tiled=True)


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Compile with few optimizations within this context, for example in tests and short programs.

    The context affects searches and ``gradients`` if they are called within the context, and a ``Trainer`` if it is
    created within the context. Compilation takes 80% less time, but the compiled code is slower. Results agree up to
    rounding.
    """
    token = _COMPILES_QUICKLY.set(True)
    try:
        yield
    finally:
        _COMPILES_QUICKLY.reset(token)


def compiler_options() -> dict[str, Any]:
    """Return the compiler options for ``jax.jit`` in this context: none by default.

    Code that compiles a model can pass these options to ``jax.jit`` to support ``quick_compilation``.
    """
    return dict(_quick_options()) if _COMPILES_QUICKLY.get() else {}


def describe() -> dict[str, str]:
    """Return the current versions, devices, number of threads, and precision settings as text for reports."""
    return {
        "version": f"{jax.__version__}, flax {flax.__version__}",
        "device": ", ".join(device.device_kind for device in _gpus()) or "cpu",
        "threads": str(os.cpu_count()),  # XLA uses all cores
        "matmuls": jax.config.jax_default_matmul_precision or "default",  # type: ignore[attr-defined, unused-ignore]
        "float64": "on" if jax.config.jax_enable_x64 else "off",  # type: ignore[attr-defined, unused-ignore]
    }


@cache
def _quick_options():
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    for name, value in _INTERNAL_OPTIONS.items():
        with suppress(ValueError, RuntimeError):
            jax.jit(lambda x: x).lower(0.0).compile({name: value})  # compiles also within jax.disable_jit
            options[name] = value
    return options


def _values(ids: Array) -> np.ndarray | None:
    """Return the values of the IDs if they can be read without delay (on a CPU, outside of traced code), else None."""
    if isinstance(ids, jax.core.Tracer) or any(device.platform != "cpu" for device in ids.devices()):
        return None
    return np.asarray(ids) if ids.is_fully_addressable else None


def _gpus() -> list[jax.Device]:
    return [device for device in jax.devices() if device.platform == "gpu"]
