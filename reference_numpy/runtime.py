"""Dtypes, devices, precision settings, and checks of inputs and random generators."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import DTypeLike

from transformer_spec.checks import check_choice, check_ids, check_mask, check_memory, to_array
from transformer_spec.names import check_float_dtype
from transformer_spec.shapes import Bool, Float, Int

DTYPES = ("float64", "float32")
DEVICES = ("cpu",)
PRECISIONS = ("highest", "fast")
THREAD_SWITCHES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")  # environment variables that BLAS reads


def set_precision(precision: str) -> None:
    """Check that a precision is valid. NumPy always computes float32 matmuls in full float32.

    Args:
        precision: ``highest`` or ``fast``. Both have the same effect.

    Raises:
        ValueError: If the precision is unknown.
    """
    check_choice("precision", precision, PRECISIONS)


def check_placement(dtype: DTypeLike, device: str | None) -> str:
    """Check a dtype and a device, and return the name of the dtype.

    Raises:
        ValueError: If the dtype is not float64 or float32, or the device is not the CPU.
    """
    name = check_float_dtype(dtype, DTYPES)
    if device is not None:
        check_choice("device", device, DEVICES)
    return name


def check_rng(rng: Any) -> None:
    """Raise a TypeError unless ``rng`` is a generator or None.

    A seed isn't accepted, because it would give the same dropout mask in every layer and step.
    """
    if rng is not None and not isinstance(rng, np.random.Generator):
        got = type(rng).__name__
        raise TypeError(f"rng must be a numpy.random.Generator: got {got}; create np.random.default_rng(seed) once")


def to_ids(name: str, ids: Any, vocab_size: int, max_positions: int | None) -> Int[ndarray, "B L"]:
    """Check the token IDs that a caller passed, and return them as an int64 array.

    A narrow dtype, such as uint8, can store the caller's IDs but not necessarily the IDs of the special tokens.
    """
    ids = to_array(name, ids)
    check_ids(name, ids.shape, ids.dtype.name, vocab_size, max_positions, ids)
    return ids.astype(np.int64, copy=False)


def to_mask(name: str, mask: Any, shape: tuple[int, int]) -> Bool[ndarray, "B L"]:
    """Check that a padding mask is boolean and has the same shape as the IDs, and return it."""
    mask = to_array(name, mask)
    check_mask(name, mask.shape, mask.dtype.name, shape)
    return mask


def to_memory(memory: Any, shape: tuple[int, ...], dtype: str) -> Float[ndarray, "B S d_model"]:
    """Check that an encoder memory has the expected shape and dtype, and return it."""
    memory = to_array("memory", memory)
    check_memory(memory.shape, memory.dtype.name, shape, dtype)
    return memory


def describe() -> dict[str, str]:
    """Return the current versions, devices, number of threads, and precision settings as text for reports."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    library = blas["name"].removeprefix("scipy-")  # NumPy's wheels contain SciPy's build of OpenBLAS
    return {
        "version": np.__version__,
        "device": platform.processor() or platform.machine(),
        "threads": next(filter(None, map(os.environ.get, THREAD_SWITCHES)), str(os.cpu_count())),
        "matmuls": f"{library} {blas.get('version', '')}".strip(),
    }
