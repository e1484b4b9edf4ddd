"""Dtypes, devices, precision settings, and input checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import debug_unwrap

from transformer_spec.checks import check_choice, check_ids, check_mask, check_memory, to_array
from transformer_spec.shapes import Bool, Float, Int
from transformer_torch import onednn

DTYPES = ("float64", "float32", "bfloat16")
DEVICES = ("cpu", "gpu")
PRECISIONS = ("highest", "fast")


def set_precision(precision: str) -> None:
    """Set the precision of float32 matmuls for the whole process.

    Args:
        precision: With ``highest``, matmuls are computed in full float32, so that results agree across frameworks. With
            ``fast``, matmuls on a GPU may use TF32, which is faster than float32.

    Raises:
        ValueError: If the precision is unknown.
    """
    check_choice("precision", precision, PRECISIONS)
    torch.set_float32_matmul_precision("highest" if precision == "highest" else "high")


def check_placement(dtype: torch.dtype | str, device: torch.device | str | None) -> None:
    """Check that this package supports a dtype, and that a device is available.

    Raises:
        ValueError: If the dtype or the device is unknown.
        RuntimeError: If the device is not visible.
    """
    to_dtype(dtype)
    to_device(device)


def to_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a ``torch.dtype``, given a dtype of PyTorch or NumPy, or its name.

    Raises:
        ValueError: If the dtype is not one of ``DTYPES``.
    """
    name = np.dtype(dtype).name if isinstance(dtype, type | np.dtype) else str(dtype).removeprefix("torch.")
    check_choice("dtype", name if name in DTYPES else dtype, DTYPES)
    return getattr(torch, name)


def to_device(device: torch.device | str | None) -> torch.device:
    """Return a ``torch.device``, given a device or its name. Use ``gpu`` for the current GPU and None for the default.

    Raises:
        ValueError: If the device is unknown.
        RuntimeError: If the device is not visible.
    """
    if device is None:
        return torch.get_default_device()
    try:
        found = torch.device("cuda" if device == "gpu" else device)
    except (RuntimeError, TypeError):
        check_choice("device", device, DEVICES)
        raise
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        which = "no GPU" if found.index is None else f"no {found}"
        raise RuntimeError(f"{which} is visible to torch {torch.__version__}")
    return found


def to_ids(name: str, ids: Any, vocab_size: int, max_positions: int | None, device: torch.device) -> Int[Tensor, "B L"]:
    """Check the token IDs that a caller passed, and return them as a tensor.

    Values are checked only if they can be read without delay: on a CPU and outside of traced code. Otherwise, an ID
    outside the vocabulary raises an IndexError in the embedding or a RuntimeError in the loss on a CPU, or triggers a
    CUDA assertion on a GPU.
    """
    ids = ids if isinstance(ids, Tensor) else to_array(name, ids)
    if isinstance(ids, Tensor) and (ids.is_nested or ids.layout != torch.strided):
        raise TypeError(f"{name} must be a dense tensor: got a nested or sparse tensor; pad it, or call to_dense()")
    check_ids(name, ids.shape, dtype_name(ids), vocab_size, max_positions, _values(ids))
    return _put(ids, torch.int64, device)


def to_mask(name: str, mask: Any, shape: tuple[int, int], device: torch.device) -> Bool[Tensor, "B L"]:
    """Check that a padding mask is boolean and has the same shape as the IDs, and return it."""
    mask = mask if isinstance(mask, Tensor) else to_array(name, mask)
    check_mask(name, mask.shape, dtype_name(mask), shape)
    return _put(mask, torch.bool, device)


def to_memory(
    memory: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "B S d_model"]:
    """Check that an encoder memory has the expected shape and dtype, and return it."""
    memory = memory if isinstance(memory, Tensor) else np.asarray(memory)
    check_memory(memory.shape, dtype_name(memory), shape, str(dtype).removeprefix("torch."))
    return _put(memory, dtype, device)


def dtype_name(x: Any) -> str:
    """Return the NumPy name of an array's or a tensor's dtype."""
    return x.dtype.name if isinstance(x, np.ndarray) else str(x.dtype).removeprefix("torch.")


def describe() -> dict[str, str]:
    """Return the current versions, devices, number of threads, and precision settings as text for reports."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "device": ", ".join(gpus) or "cpu",
        "threads": str(torch.get_num_threads()),
        "matmul library on a CPU": onednn.describe(),
        # get_float32_matmul_precision raises an error if one of these settings has been changed.
        "matmuls": f"{torch.backends.mkldnn.matmul.fp32_precision} on a CPU, "  # type: ignore[attr-defined]
        f"{torch.backends.cuda.matmul.fp32_precision} on a GPU",
    }


def _values(ids: Tensor | np.ndarray) -> np.ndarray | None:
    """Return the values of the IDs if they can be read without delay, else None.

    The values of a CPU tensor can be read unless the tensor is traced, fake, or transformed. Tensors that were created
    in inference mode, such as the tokens of a search, are skipped because reading them would take 5% of a small model's
    decoding step.
    """
    if isinstance(ids, np.ndarray):
        return ids
    if torch.compiler.is_compiling() or type(ids) is not Tensor or ids.device.type != "cpu" or ids.is_inference():
        return None
    try:
        return ids.numpy() if debug_unwrap(ids) is ids else None
    except RuntimeError:  # in a torch.func transform, a tensor may have no storage
        return None


def _put(x: Tensor | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor on a device. It doesn't alias the caller's NumPy array, whose strides may be negative."""
    if isinstance(x, Tensor):
        return x.to(device, dtype)
    if dtype == torch.bfloat16:  # PyTorch can't read NumPy's bfloat16, so copy the bits
        return _put(x.view(np.int16), torch.int16, device).view(dtype)
    tensor = torch.from_numpy(np.array(x, str(dtype).removeprefix("torch.")))
    if device.type == "cuda" and type(tensor) is Tensor:  # pinned memory is copied asynchronously
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
