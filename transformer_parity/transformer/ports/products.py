"""Matrix products of each framework's library: which library it is, and how fast it multiplies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

QUICK = 1024  # rows and columns of the matrices of `parity info`


def timed(run: Callable[[], Any]) -> float:
    """Return how long a call takes, in seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def quick_rate(backend: str) -> float:
    """Return the rate of a product of 1,024 rows on the CPU, in operations a second; it takes some 0.1 seconds."""
    multiply = multiplied(backend, (QUICK, QUICK, QUICK), "float32", "cpu")
    return 2 * QUICK**3 / min(timed(multiply) for _ in range(5))


def multiplied(backend: str, sizes: tuple[int, int, int], dtype: str, device: str) -> Callable[[], Any]:
    """Return what multiplies two random matrices by a package's library, and returns when that is done.

    Args:
        backend: The package, which has been imported.
        sizes: Rows of the left one, rows of the right one, columns of the right one.
        dtype: Of both.
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
    """Return what takes a package's products on a CPU, in words, from its description."""
    if backend == "torch":
        return environment["products on a CPU"]
    if backend == "tf":
        return f"{'Eigen' if os.environ.get('TF_ENABLE_ONEDNN_OPTS') == '0' else 'oneDNN'}; XLA where compiled"
    return "XLA" if backend == "jax" else environment["matrix products"]
