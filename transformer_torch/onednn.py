"""Float32 products by oneDNN, where a measurement shows that they pay.

PyTorch takes them from its BLAS, usually MKL, which reaches half of an AMD processor's rate. The public switch that
hands them to oneDNN is ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"``: oneDNN then *may* round to bfloat16.
It does where the processor multiplies bfloat16 faster (Intel's AMX), and computes in float32 elsewhere. No name of a
processor says which, so both speed and accuracy are measured, once in a process.

For few rows, as in a step of a search, other layouts of the weights pay. PyTorch has no public name for what lays them
out and multiplies by them: torch.compile calls the same operators for frozen weights, and no other module here does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

ROWS, INNER, COLUMNS = 128, 512, 2048  # of the product that is timed
ROUNDS = 9  # of 2 ms a product
GAIN = 1.5  # times as fast: less is lost again in small products, and noise does not reach it
SHORT = 2**14  # scores of a head: up to here, separate products are quicker
LARGE_WEIGHT = 2**20  # weights: from here on, its own layout pays for few rows
LARGE_PRODUCT = 2**19  # multiplications: likewise, where the switch is on
ERROR = 2.0**-20  # eight epsilons of float32; products rounded to bfloat16 are off by 2**-9


class Measured(NamedTuple):
    """What oneDNN's products are, beside those of the BLAS.

    Attributes:
        gain: How many times as fast.
        error: The largest relative error of several products, in the Euclidean norm.
    """

    gain: float
    error: float


def pays(precision: str) -> bool:
    """Return whether oneDNN should take float32 products on a CPU; ``highest`` asks for their accuracy too."""
    if not torch.backends.mkldnn.is_available():
        return False
    found = measured()
    return found.gain >= GAIN and (precision == "fast" or found.error <= ERROR)


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


@cache
def measured() -> Measured:
    """Measure both, in less than 0.2 seconds; the process's switch is as before afterwards."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        for shape in ((ROWS, INNER), (COLUMNS, INNER), (ROWS, COLUMNS))
    )
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), _one_thread():
        seconds: dict[str, list[float]] = {"ieee": [], "bf16": []}
        for _ in range(ROUNDS):
            for switch, times in seconds.items():
                with _switched(switch):
                    F.linear(x, weight)  # what the other one left in the caches is not to its advantage
                    times.append(_time(lambda: F.linear(x, weight)))
        with _switched("bf16"):
            error = max(map(_error, (x, x[:8], grad, grad.T), (weight.T, weight.T, weight, x)))
    return Measured(min(seconds["ieee"]) / min(seconds["bf16"]), error)


@contextmanager
def _switched(switch: str) -> Iterator[None]:
    """Set the process's switch for a block."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = switch
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in the calling thread alone, whose processor time other load on the machine hardly changes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _time(run: Callable[[], Tensor]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def _error(left: Tensor, right: Tensor) -> float:
    """Return the relative error of a product, by its first rows in float64."""
    truth = left[:16].double() @ right.double()
    return float((((left @ right)[:16] - truth).norm() / truth.norm()).item())


def describe() -> str:
    """Return which library takes float32 products on a CPU, and what is known of the other."""
    blas = "MKL" if torch.backends.mkl.is_available() else "the BLAS"
    chosen = "oneDNN" if is_on() else blas
    if not measured.cache_info().currsize:
        return chosen
    gain, error = measured()
    return f"{chosen}; measured: oneDNN {gain:.2f} times as fast, error {error:.1e}"
