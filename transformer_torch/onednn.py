"""Choice of kernels and weight layouts for MKL and oneDNN, the CPU libraries that PyTorch uses for matmuls.

``torch.set_float32_matmul_precision("medium")`` makes PyTorch use oneDNN for float32 matmuls, which may then round to
bfloat16. PyTorch has no public function that converts weights to these layouts, so this module calls the operators that
torch.compile uses for frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

SHORT = 2**14  # maximum number of scores per head for which separate matmuls are faster than the fused kernel
LARGE_WEIGHT = 2**20  # minimum number of weights for which oneDNN's layout is faster if the input has few rows
# If a matmul has fewer multiplications than LARGE_PRODUCT, MKL's layout is faster, even if oneDNN is on.
LARGE_PRODUCT = 2**19


def is_on() -> bool:
    """Return whether PyTorch currently uses oneDNN for float32 matmuls on a CPU."""
    return torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]


def delays_attention(query: Tensor, key: Tensor) -> bool:
    """Return whether the fused attention kernel is slower than separate matmuls because oneDNN is on.

    The kernel calls one matmul per head of each sequence, and oneDNN takes at least 40 microseconds per matmul, even if
    the matmul is small. At 64 positions, the kernel is therefore 5 to 10 times slower than without oneDNN. At 200
    positions, it is as fast as separate matmuls.
    """
    if torch.compiler.is_compiling() or query.shape[-2] == 1 or not is_on():  # check last, because it is slow
        return False
    is_affected = query.device.type == "cpu" and query.dtype == torch.float32
    return is_affected and query.shape[-2] * key.shape[-2] <= SHORT


def takes_bfloat16() -> bool:
    """Return whether oneDNN supports bfloat16 matmuls on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def for_few_rows(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """Return a function like ``F.linear`` that stores the weight in the fastest layout for inputs with ``rows`` rows.

    oneDNN needs 15 microseconds to start a matmul. MKL needs only 5 microseconds to multiply 8 rows by 128 x 128
    weights, so small matmuls use MKL.
    """
    is_float32, switched = weight.dtype == torch.float32, is_on()
    if is_float32 and switched and torch.backends.mkl.is_available() and rows * weight.numel() < LARGE_PRODUCT:
        return partial(_by_mkl, torch.ops.mkl._mkl_reorder_linear_weight(weight, rows), weight, bias, rows)
    has_layout = torch.backends.mkldnn.is_available() and weight.dtype != torch.float64
    if has_layout and (not is_float32 or switched or weight.numel() >= LARGE_WEIGHT):
        return partial(_by_onednn, torch.ops.mkldnn._reorder_linear_weight(weight, rows), bias)
    return partial(F.linear, weight=weight.t().contiguous().t(), bias=bias)


def _by_mkl(packed: Tensor, weight: Tensor, bias: Tensor | None, rows: int, x: Tensor) -> Tensor:
    return torch.ops.mkl._mkl_linear(x, packed, weight, bias, rows)


def _by_onednn(reordered: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")


def describe() -> str:
    """Return the name of the library that computes float32 matmuls on a CPU."""
    return "oneDNN" if is_on() else "MKL" if torch.backends.mkl.is_available() else "the BLAS"
