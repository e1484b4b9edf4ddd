"""The name and throughput of each framework's matmul library."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

QUICK = 1024  # number of rows and columns of the matrices that `parity info` multiplies


def timed(run: Callable[[], Any]) -> float:
    """Return the duration of a call, in seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def quick_rate(backend: str) -> float:
    """Measure the throughput of a 1,024 by 1,024 float32 matmul on the CPU, in operations per second.

    The measurement takes about 0.1 seconds.
    """
    multiply = multiplied(backend, (QUICK, QUICK, QUICK), "float32", "cpu")
    return 2 * QUICK**3 / min(timed(multiply) for _ in range(5))


def multiplied(backend: str, sizes: tuple[int, int, int], dtype: str, device: str) -> Callable[[], Any]:
    """Return a function that multiplies two random matrices using a backend's matmul library and waits for the result.

    Args:
        backend: Name of the backend. Its package must have been imported.
        sizes: The sizes (m, k, n) for multiplying an [m, k] matrix by a [k, n] matrix.
        dtype: Dtype of both matrices.
        device: ``cpu`` or ``gpu``.
    """
    rows, inner, columns = sizes
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal(shape, np.float32) for shape in ((rows, inner), (inner, columns)))
    if backend == "torch":
        import torch

        place = torch.device("cuda" if device == "gpu" else "cpu")
        matrices = [torch.from_numpy(x).to(place, getattr(torch, dtype)) for x in (left, right)]
        room = torch.empty(rows, columns, dtype=matrices[0].dtype, device=place)

        def run() -> None:
            torch.mm(*matrices, out=room)
            if place.type == "cuda":
                torch.cuda.synchronize()

        return run
    if backend == "jax":
        import jax

        arrays = [
            jax.device_put(jax.numpy.asarray(x, dtype), jax.local_devices(backend=device)[0]) for x in (left, right)
        ]
        multiply = jax.jit(jax.numpy.matmul)
        return lambda: multiply(*arrays).block_until_ready()
    if backend == "tf":
        import tensorflow as tf

        with tf.device(f"{device}:0"):
            tensors = [tf.constant(x, dtype) for x in (left, right)]

        def run_tf() -> None:
            tf.matmul(*tensors)
            tf.test.experimental.sync_devices()

        return run_tf
    out = np.empty((rows, columns), np.float32)
    return lambda: np.matmul(left, right, out=out)


def library(environment: dict[str, str], backend: str) -> str:
    """Return the name of the library that computes a backend's matmuls on a CPU.

    Args:
        environment: Description of the backend's environment.
        backend: Name of the backend.
    """
    if backend == "torch":
        return environment["matmul library on a CPU"]
    if backend == "tf":
        return f"{'Eigen' if os.environ.get('TF_ENABLE_ONEDNN_OPTS') == '0' else 'oneDNN'}; XLA if compiled"
    return "XLA" if backend == "jax" else environment["matmuls"]
