"""The limit of this machine: the best rate of products and of reading, over the libraries that take part."""

# ruff: noqa: D102  methods are documented in Participant

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import reference_numpy as ref
from transformer_bench.matrix_products import Product
from transformer_bench.measurements import Entry
from transformer_bench.rounds import Participant
from transformer_bench.workload import Work
from transformer_parity.transformer.ports.registry import PORTS

WIDTH = {"cpu": 2048, "gpu": 8192}  # of the matrices of a large product
QUICK = 1024  # likewise, where the answer is to come at once
ROW = 512  # numbers in each row of what is read
LEAST_READ = 2**18  # numbers: from the second-level cache at the least


@dataclass(frozen=True)
class Limit:
    """What the machine can do, by library.

    Attributes:
        rates: Of a large product, in operations a second.
        bandwidths: Of reading as much as the weights of the work, in bytes a second; a cache may hold them.
        libraries: What takes the products, in words.
    """

    rates: dict[str, float]
    bandwidths: dict[str, float]
    libraries: dict[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """The best rate of a product."""
        return max(self.rates.values())

    @property
    def bandwidth(self) -> float:
        """The best rate of reading."""
        return max(self.bandwidths.values())

    def seconds(self, work: Work) -> float:
        """Return the time of some work at this limit.

        Each product takes the time of its operations at the best rate, or that of reading its right operand, weights or
        keys and values, whichever is longer. In training, Adam reads weights, gradients and two moments in float32, and
        writes all but the gradients.
        """
        size = 2 if work.dtype == "bfloat16" else 4
        update = 7 * 4 * ref.count_parameters(work.config) if work.task == "train" else 0
        return update / self.bandwidth + sum(self._seconds(product, size) for product in work.products())

    def _seconds(self, product: Product, size: int) -> float:
        return max(product.operations / self.rate, size * math.prod(product.right) / self.bandwidth)

    def to_dict(self, work: Work) -> dict[str, Any]:
        """Return plain values."""
        return {"rate": self.rate, "bandwidth": self.bandwidth, "seconds": self.seconds(work), **asdict(self)}


@dataclass
class LibraryEntry(Entry):
    """A library, and the rates of each round: of products and of reading."""

    found: list[tuple[float, float]] = field(default_factory=list)

    def add(self, reply: Any) -> None:
        """Keep the rates too."""
        super().add(reply)
        self.found.append(reply.answer)


@dataclass
class Library(Participant):
    """The library by which a package multiplies: a large product, and reading as much as the weights of the work."""

    backend: str

    has_result = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"products of {self.backend}"

    def prepare(self) -> dict[str, str]:
        package = PORTS[self.backend].import_package()
        package.set_precision("highest")  # in PyTorch, by the better of two libraries
        return package.describe()

    def load(self, work: Work, weights: Path) -> None:
        width, numbers = WIDTH[work.device], max(LEAST_READ, ref.count_parameters(work.config))
        multiply = multiplied(self.backend, (width, width, width), work.dtype, work.device)
        read = multiplied(self.backend, (numbers // ROW, ROW, 1), work.dtype, work.device)
        self._steps = (2 * width**3, multiply), (numbers * (2 if work.dtype == "bfloat16" else 4), read)

    def run(self) -> tuple[float, ...]:
        return tuple(amount / timed(step) for amount, step in self._steps)


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


def libraries(backends: Collection[str], work: Work, *, peers: bool = False) -> list[Library]:
    """Return the libraries that take part in some work; XLA is asked through JAX, and where that is not, through TF."""
    names = {*backends, *(("torch", "jax") if peers else ())}
    if work.device == "cpu" and work.dtype == "float32":
        names.add("numpy")
    if "jax" in names:
        names.discard("tf")
    return [Library(name) for name in PORTS if name in names and not PORTS[name].missing()]


def limit_of(backends: Sequence[str], entries: Sequence[LibraryEntry]) -> Limit | None:
    """Return the limit by the medians of the rounds; None where nothing was measured."""
    found = {
        name: [median(values) for values in zip(*entry.found, strict=True)]
        for name, entry in zip(backends, entries, strict=True)
        if entry.is_timed
    }
    if not found:
        return None
    described = {name: entry.environment for name, entry in zip(backends, entries, strict=True)}
    return Limit(
        {name: rate for name, (rate, _) in found.items()},
        {name: bandwidth for name, (_, bandwidth) in found.items()},
        {name: library(described[name], name) for name in found},
    )


def library(environment: dict[str, str], backend: str) -> str:
    """Return what takes a package's products on a CPU, in words, from its description."""
    if backend == "torch":
        return environment["products on a CPU"]
    if backend == "tf":
        return f"{'Eigen' if os.environ.get('TF_ENABLE_ONEDNN_OPTS') == '0' else 'oneDNN'}; XLA where compiled"
    return "XLA" if backend == "jax" else environment["matrix products"]
