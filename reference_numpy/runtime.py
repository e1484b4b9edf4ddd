"""Dtypes, devices and precision by name, and checks of ids, masks, memories and generators."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import DTypeLike

from transformer_spec.checks import check_choice, check_ids, check_mask, check_memory, to_array
from transformer_spec.shapes import Bool, Float, Int

DTYPES = ("float64", "float32")
DEVICES = ("cpu",)
PRECISIONS = ("highest", "fast")
THREAD_SWITCHES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")  # what NumPy's BLAS listens to


def set_precision(precision: str) -> None:
    """Accept ``highest`` or ``fast``: NumPy computes in full float32 either way. ValueError for another precision."""
    check_choice("precision", precision, PRECISIONS)


def check_placement(dtype: DTypeLike, device: str | None) -> str:
    """Return the name of a dtype; ValueError if NumPy cannot compute a model in it or has no such device."""
    name: Any = dtype
    if dtype is not None:  # which np.dtype reads as float64
        with suppress(TypeError, ValueError):
            name = np.dtype(dtype).name
    check_choice("dtype", name, DTYPES)
    if device is not None:
        check_choice("device", device, DEVICES)
    return name


def check_rng(rng: Any) -> None:
    """Raise TypeError unless dropout can be drawn; a seed would draw the same elements in every layer and step."""
    if rng is not None and not isinstance(rng, np.random.Generator):
        got = type(rng).__name__
        raise TypeError(f"rng must be a numpy.random.Generator: got {got}; create np.random.default_rng(seed) once")


def to_ids(name: str, ids: Any, vocab_size: int, max_positions: int | None) -> Int[ndarray, "B L"]:
    """Take token ids from the outside, checked."""
    ids = to_array(name, ids)
    check_ids(name, ids.shape, ids.dtype.name, vocab_size, max_positions, ids)
    return ids


def to_mask(name: str, mask: Any, shape: tuple[int, int]) -> Bool[ndarray, "B L"]:
    """Take a padding mask from the outside, checked against the shape of its ids."""
    mask = to_array(name, mask)
    check_mask(name, mask.shape, mask.dtype.name, shape)
    return mask


def to_memory(memory: Any, shape: tuple[int, ...], dtype: str) -> Float[ndarray, "B S d_model"]:
    """Take a memory from the outside, checked against the shape of its source and the model's dtype."""
    memory = to_array("memory", memory)
    check_memory(memory.shape, memory.dtype.name, shape, dtype)
    return memory


def describe() -> dict[str, str]:
    """Return versions, devices, threads and precision switches, as they are now."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    library = blas["name"].removeprefix("scipy-")  # of whose builds NumPy's own packages have one
    return {
        "version": np.__version__,
        "device": platform.processor() or platform.machine(),
        "threads": next(filter(None, map(os.environ.get, THREAD_SWITCHES)), str(os.cpu_count())),
        "matrix products": f"{library} {blas.get('version', '')}".strip(),
    }
