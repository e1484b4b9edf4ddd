"""Layouts of weights and choices of kernels for the CPU libraries that PyTorch multiplies with, MKL and oneDNN.

``torch.set_float32_matmul_precision("medium")`` hands float32 matmuls to oneDNN, which may then round to bfloat16.
PyTorch has no public name for the layouts for few rows: torch.compile calls the same operators for frozen weights, and
no other module here does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

SHORT = 2**14  # scores of a head: up to here, separate products are quicker
LARGE_WEIGHT = 2**20  # weights: from here on, its own layout pays for few rows
LARGE_PRODUCT = 2**19  # multiplications: likewise, where the switch is on


def is_on() -> bool:
    """Return whether the process's switch hands float32 products on a CPU to oneDNN."""
    return torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]


def delays_attention(query: Tensor, key: Tensor) -> bool:
    """Return whether the fused kernel for attention takes longer than its separate products, where oneDNN is on.

    It takes a product for each head of each sentence. oneDNN spends 40 microseconds on one, however small: 5 to 10
    times as long as the whole kernel takes without it at 64 positions, and as long as separate products at 200.
    """
    if torch.compiler.is_compiling() or query.shape[-2] == 1 or not is_on():  # which takes longer to read than these
        return False
    is_affected = query.device.type == "cpu" and query.dtype == torch.float32
    return is_affected and query.shape[-2] * key.shape[-2] <= SHORT


def takes_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def for_few_rows(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """Return what ``F.linear`` does for so many rows, by a copy of the weight in the layout that is quickest for them.

    oneDNN needs 15 microseconds to begin a product, three times as long as MKL takes for one of 8 rows by 128 x 128
    weights. Such products are left to MKL.
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
    """Return which library computes float32 matmuls on a CPU."""
    return "oneDNN" if is_on() else "MKL" if torch.backends.mkl.is_available() else "the BLAS"
