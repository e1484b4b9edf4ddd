"""Float32 products by oneDNN, where a measurement shows that they pay.

PyTorch takes them from its BLAS, usually MKL, which reaches half of an AMD processor's rate. The public switch that
hands them to oneDNN is ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"``: oneDNN then *may* round to bfloat16.
It does where the processor multiplies bfloat16 faster (Intel's AMX), and computes in float32 elsewhere. No name of a
processor says which, so both speed and accuracy are measured, once in a process.

For few rows, as in a step of a search, weights pay in oneDNN's own layout. PyTorch has no public name for what lays
them out and multiplies by them; nothing else calls its operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

ROWS, INNER, COLUMNS = 128, 512, 2048  # of the product that is timed
ROUNDS = 9  # of 2 ms a product
GAIN = 1.5  # times as fast: less is lost again in small products, and noise does not reach it
SHORT = 2**14  # scores of a head: up to here, separate products are quicker
LARGE_WEIGHT = 2**20  # weights: from here on, its own layout pays for few rows
LARGE_PRODUCT = 2**19  # multiplications: likewise, where its products are faster
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


def lay_out(weight: Tensor, rows: int) -> Tensor:
    """Return a copy of a weight [out, in] in the layout that is quickest for few rows, to be used by ``multiply``."""
    pays = weight.numel() >= LARGE_WEIGHT or (is_on() and rows * weight.numel() >= LARGE_PRODUCT)
    has_layout = weight.dtype != torch.float64 and torch.backends.mkldnn.is_available()
    if has_layout and (pays or weight.dtype == torch.bfloat16):
        return torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return weight.t().contiguous().t()


@contextmanager
def only_as_laid_out() -> Iterator[None]:
    """Leave to oneDNN, in a block, only the products by weights that were laid out for it.

    It needs 15 microseconds to begin a product, three times as long as the BLAS takes for one of 8 rows by 128 x 128
    weights. With the switch on, it also takes one row by its own layout in twice the time. Where it rounds to bfloat16,
    as ``fast`` permits, it keeps all products.
    """
    if is_on() and measured().error <= ERROR:
        with _switched("ieee"):
            yield
    else:
        yield


def multiply(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Multiply by a weight in any layout and add a bias."""
    if weight.is_mkldnn:  # what F.linear refuses; torch.compile calls the same operators for frozen weights
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


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
