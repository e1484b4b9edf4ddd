"""Float32 matmuls of PyTorch by oneDNN, if a measurement shows that it is faster.

PyTorch uses its BLAS, usually MKL, which reaches half of an AMD processor's peak. The public switch for oneDNN is
``torch.set_float32_matmul_precision("medium")``, which permits bfloat16. oneDNN uses that on processors that multiply
bfloat16 faster (Intel's AMX), and float32 on others. No name of a processor tells them apart, so speed and accuracy are
measured, once per process. Meanwhile the process's switch and number of threads change, so only commands measure:
``transformer_torch`` itself never does.
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


def prefer(precision: str) -> None:
    """Let oneDNN compute float32 matmuls on a CPU if that pays, for the whole process; a GPU would then allow TF32."""
    if not torch.cuda.is_available() and pays(precision):
        torch.set_float32_matmul_precision("medium")


def describe() -> str:
    """Return how fast and how accurate oneDNN is, in words."""
    return (
        ""
        if not torch.backends.mkldnn.is_available()
        else "; measured: oneDNN {:.2f} times as fast, error {:.1e}".format(*measured())
    )


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
