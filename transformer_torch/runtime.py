"""The machine: dtypes, devices and precision by name, and the way in for ids and masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reference_numpy.checks import check_choice, check_ids, check_mask, check_memory

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

DTYPES = ("float64", "float32", "bfloat16")
DEVICES = ("cpu", "gpu")
PRECISIONS = ("highest", "fast")


def set_precision(precision: str) -> None:
    """Choose how float32 matrix products are computed, for the whole process.

    Args:
        precision: ``highest`` computes in full float32, for agreement; ``fast`` allows fewer bits of mantissa
            (TF32 on a GPU), for speed. Most CPUs compute in full float32 either way.

    Raises:
        ValueError: There is no such precision.
    """
    check_choice("precision", precision, PRECISIONS)
    torch.set_float32_matmul_precision("highest" if precision == "highest" else "high")


def check_placement(dtype: str, device: str) -> None:
    """Refuse a dtype or device that this backend or this machine lacks.

    Raises:
        ValueError: The backend knows no such dtype or device.
        RuntimeError: The device is known but none is visible.
    """
    check_choice("dtype", dtype, DTYPES)
    check_choice("device", device, DEVICES)
    if device == "gpu" and not torch.cuda.is_available():
        raise RuntimeError(f"no GPU is visible to torch {torch.__version__}")


def to_device(device: str) -> torch.device:
    """Return the framework's own device of that name."""
    return torch.device("cuda" if device == "gpu" else device)


def to_ids(name: str, ids: Any, vocab_size: int, max_positions: int | None, device: torch.device) -> Int[Tensor, "B L"]:
    """Take token ids from the outside, checked."""
    if isinstance(ids, Tensor):
        values = None if torch.compiler.is_compiling() else ids.detach().cpu().numpy()
        check_ids(name, ids.shape, dtype_name(ids), vocab_size, max_positions, values)
        return ids.to(device, torch.int64)
    array = np.asarray(ids)
    check_ids(name, array.shape, array.dtype.name, vocab_size, max_positions, array)
    tensor = torch.from_numpy(array.astype(np.int64))  # a copy: the caller's array is never aliased
    if device.type == "cuda":  # from pinned memory the copy does not wait for the GPU's earlier work
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def to_mask(name: str, mask: Any, shape: tuple[int, int], device: torch.device) -> Bool[Tensor, "B L"]:
    """Take a padding mask from the outside, checked against the shape of its ids."""
    if isinstance(mask, Tensor):
        check_mask(name, mask.shape, dtype_name(mask), shape)
        return mask.to(device)
    array = np.asarray(mask)
    check_mask(name, array.shape, array.dtype.name, shape)
    return torch.tensor(array, device=device)


def to_memory(memory: Any, shape: tuple[int, ...], dtype: str, device: torch.device) -> Float[Tensor, "B S d_model"]:
    """Take a memory from the outside, checked against the shape of its source and the model's dtype."""
    array = memory if isinstance(memory, Tensor) else torch.as_tensor(np.asarray(memory))
    check_memory(array.shape, dtype_name(array), shape, dtype)
    return array.to(device)


def dtype_name(x: Tensor) -> str:
    """Return the dtype of a tensor by its NumPy name."""
    return str(x.dtype).removeprefix("torch.")


def describe() -> dict[str, str]:
    """Return versions, devices, threads and precision switches, as they are now."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "device": ", ".join(gpus) or "cpu",
        "threads": str(torch.get_num_threads()),
        "matrix products": torch.get_float32_matmul_precision(),
        "TF32": str(torch.backends.cuda.matmul.allow_tf32),
    }
