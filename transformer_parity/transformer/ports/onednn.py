"""Switch PyTorch's float32 matmuls to oneDNN if a measurement shows that oneDNN is faster.

By default, PyTorch uses a BLAS library, usually MKL, which reaches only half of the peak throughput of AMD processors.
The public switch for oneDNN is ``torch.set_float32_matmul_precision("medium")``, which permits bfloat16. oneDNN then
uses bfloat16 if the processor supports fast bfloat16 multiplication (Intel's AMX), and float32 otherwise. Because the
processor's name doesn't determine which dtype oneDNN uses, this module measures speed and accuracy once per process.
The measurement temporarily changes the process-wide switch and the number of threads. Therefore, only the commands of
``parity`` run the measurement, and ``transformer_torch`` never does.
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

ROWS, INNER, COLUMNS = 128, 512, 2048  # sizes of the timed matmul
ROUNDS = 9  # number of timed matmuls per library; each takes about 2 ms
# Minimum speedup for switching to oneDNN. Measurement noise never causes an apparent speedup of 1.5. A smaller speedup
# wouldn't pay off, because small matmuls are slower with oneDNN.
GAIN = 1.5
ERROR = 2.0**-20  # maximum relative error: 8 float32 epsilons; bfloat16 causes a relative error of about 2**-9


class Measured(NamedTuple):
    """Speed and accuracy of oneDNN's matmuls, compared with the matmuls of the BLAS library.

    Attributes:
        gain: Speedup of oneDNN relative to the BLAS.
        error: Largest relative error of the measured oneDNN matmuls, in the Euclidean norm.
    """

    gain: float
    error: float


def pays(precision: str) -> bool:
    """Return True if oneDNN should compute float32 matmuls on a CPU.

    oneDNN must be fast enough and, with precision ``highest``, also accurate enough.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    found = measured()
    return found.gain >= GAIN and (precision == "fast" or found.error <= ERROR)


def prefer(precision: str) -> None:
    """Switch the process's float32 matmuls to oneDNN if oneDNN is faster.

    Processes with a GPU keep the default, because the same switch would allow TF32 on the GPU.
    """
    if not torch.cuda.is_available() and pays(precision):
        torch.set_float32_matmul_precision("medium")


def describe() -> str:
    """Return a phrase that describes the measured speed and accuracy of oneDNN."""
    return (
        ""
        if not torch.backends.mkldnn.is_available()
        else "; measured: oneDNN {:.2f} times as fast, error {:.1e}".format(*measured())
    )


@cache
def measured() -> Measured:
    """Measure oneDNN's speed and accuracy in less than 0.2 seconds, and restore the process-wide setting for oneDNN."""
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
                    F.linear(x, weight)  # warm up, so that neither library benefits from data that the other one cached
                    times.append(_time(lambda: F.linear(x, weight)))
        with _switched("bf16"):
            error = max(map(_error, (x, x[:8], grad, grad.T), (weight.T, weight.T, weight, x)))
    return Measured(min(seconds["ieee"]) / min(seconds["bf16"]), error)


@contextmanager
def _switched(switch: str) -> Iterator[None]:
    """Set the process-wide matmul switch within a block of code."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = switch
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use only one thread within a block of code. Other processes barely affect the CPU time of a single thread."""
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
    """Return the relative error of the first 16 rows of a matmul, compared with a float64 matmul."""
    truth = left[:16].double() @ right.double()
    return float((((left @ right)[:16] - truth).norm() / truth.norm()).item())
