"""The machine's peak: the highest matmul throughput and memory bandwidth that any library in use reaches."""

# ruff: noqa: D102  methods are documented in TimedImplementation

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import reference_numpy as ref
from transformer_bench.matmuls import Matmul
from transformer_bench.measurements import Entry
from transformer_bench.rounds import TimedImplementation
from transformer_bench.workload import Work
from transformer_parity.transformer.ports.matmuls import library, multiplied, timed
from transformer_parity.transformer.ports.registry import PORTS

WIDTH = {"cpu": 2048, "gpu": 8192}  # width of the square matrices that measure the matmul throughput
ROW = 512  # row length of the matrix that is read to measure the memory bandwidth
LEAST_READ = 2**18  # minimum number of elements of this matrix, so that it exceeds the first-level cache


@dataclass(frozen=True)
class Peak:
    """The machine's peak matmul throughput and memory bandwidth, measured with each library.

    Attributes:
        rates: The throughput of a large matmul with each library, in operations per second.
        bandwidths: The memory bandwidth with each library, in bytes per second. The benchmark measures it by reading as
            many bytes as the workload's weights occupy. If these bytes fit in a cache, the result is the bandwidth of
            the cache.
        libraries: A description of each matmul library.
    """

    rates: dict[str, float]
    bandwidths: dict[str, float]
    libraries: dict[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """The highest matmul throughput of any library."""
        return max(self.rates.values())

    @property
    def bandwidth(self) -> float:
        """The highest memory bandwidth that any library reached."""
        return max(self.bandwidths.values())

    def seconds(self, work: Work) -> float:
        """Return the minimum time in seconds that a workload takes at this peak, according to a roofline model.

        The time for each matmul is the time for its arithmetic operations or the time for reading its right operand
        (weights, keys, or values), whichever is longer. In training, Adam also reads the weights, gradients, and two
        moments in float32, and writes all of them except the gradients.
        """
        size = 2 if work.dtype == "bfloat16" else 4
        update = 7 * 4 * ref.count_parameters(work.config) if work.task == "train" else 0
        return update / self.bandwidth + sum(self._seconds(matmul, size) for matmul in work.matmuls())

    def _seconds(self, matmul: Matmul, size: int) -> float:
        return max(matmul.operations / self.rate, size * math.prod(matmul.right) / self.bandwidth)

    def to_dict(self, work: Work) -> dict[str, Any]:
        """Return the fields as built-in Python types."""
        return {"rate": self.rate, "bandwidth": self.bandwidth, "seconds": self.seconds(work), **asdict(self)}


@dataclass
class LibraryEntry(Entry):
    """The measurements of one library: its matmul throughput and memory bandwidth in each round."""

    found: list[tuple[float, float]] = field(default_factory=list)

    def add(self, reply: Any) -> None:
        """Add the measurements of a round, including the throughput and the bandwidth."""
        super().add(reply)
        self.found.append(reply.answer)


@dataclass
class Library(TimedImplementation):
    """A package's matmul library. It runs a large matmul, and reads as many bytes as the workload's weights occupy."""

    backend: str

    has_result = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"matmuls of {self.backend}"

    def prepare(self) -> dict[str, str]:
        package = PORTS[self.backend].import_package()
        package.set_precision("highest")
        if self.backend == "torch":
            from transformer_parity.transformer.ports import onednn

            onednn.prefer("highest")
        return package.describe()

    def load(self, work: Work, weights: Path) -> None:
        width, numbers = WIDTH[work.device], max(LEAST_READ, ref.count_parameters(work.config))
        multiply = multiplied(self.backend, (width, width, width), work.dtype, work.device)
        read = multiplied(self.backend, (numbers // ROW, ROW, 1), work.dtype, work.device)
        self._steps = (2 * width**3, multiply), (numbers * (2 if work.dtype == "bfloat16" else 4), read)

    def run(self) -> tuple[float, ...]:
        return tuple(amount / timed(step) for amount, step in self._steps)


def libraries(backends: Collection[str], work: Work, *, peers: bool = False) -> list[Library]:
    """Return the libraries to measure for the given workload.

    TensorFlow isn't measured if JAX is measured, because both use XLA.
    """
    names = {*backends, *(("torch", "jax") if peers else ())}
    if work.device == "cpu" and work.dtype == "float32":
        names.add("numpy")
    if "jax" in names:
        names.discard("tf")
    return [Library(name) for name in PORTS if name in names and not PORTS[name].missing()]


def peak_of(backends: Sequence[str], entries: Sequence[LibraryEntry]) -> Peak | None:
    """Return the peak matmul throughput and memory bandwidth. Return None if no library was measured.

    The value for each library is the median over all rounds.
    """
    found = {
        name: [median(values) for values in zip(*entry.found, strict=True)]
        for name, entry in zip(backends, entries, strict=True)
        if entry.is_timed
    }
    if not found:
        return None
    described = {name: entry.environment for name, entry in zip(backends, entries, strict=True)}
    return Peak(
        {name: rate for name, (rate, _) in found.items()},
        {name: bandwidth for name, (_, bandwidth) in found.items()},
        {name: library(described[name], name) for name in found},
    )
