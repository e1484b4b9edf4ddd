"""The matrix multiplications in a benchmark, and a baseline that runs only these matrix multiplications."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from transformer_bench.rounds import TimedImplementation


@dataclass(frozen=True)
class Matmul:
    """A matrix multiplication.

    Attributes:
        left: The shape of the left operand, [..., rows, inner].
        right: The shape of the right operand, [..., inner, columns].
        operand: The name of the right operand. Operands with the same name use the same memory.
        transposed: The operand that is a transposed view: ``left``, ``right``, or empty if neither operand is.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    operand: str
    transposed: str = ""

    @property
    def operations(self) -> int:
        """The number of additions and multiplications."""
        return 2 * math.prod(self.left) * self.right[-1]

    def backward(self) -> Iterator[Matmul]:
        """Yield the matmuls that compute the gradients of both operands."""
        *outer, rows, inner = self.left
        columns = self.right[-1]
        back = "" if self.transposed == "right" else "right"
        yield Matmul((*outer, rows, columns), (*outer, columns, inner), self.operand, back)
        yield Matmul((*outer, inner, rows), (*outer, rows, columns), f"{self.operand} gradient", "left")


class HasMatmuls(Protocol):
    """A workload that can list its matrix multiplications."""

    def matmuls(self) -> Iterator[Matmul]:
        """Yield all matmuls in the order of execution."""


@dataclass
class Matmuls(TimedImplementation):
    """A baseline that runs only the matmuls of a workload in NumPy.

    The time of this baseline is a lower bound for the reference's time.
    """

    name: str = "matmuls"

    has_result = False

    def prepare(self) -> dict[str, str]:
        """Return the version of NumPy and its matmul library."""
        return ref.describe()

    def load(self, work: HasMatmuls, weights: Path) -> None:
        """Create random operands. Operands with the same name, such as a growing cache, share one array."""
        matmuls, rng = list(work.matmuls()), np.random.default_rng(0)

        def random(shape: tuple[int, ...], *, transposed: bool) -> ndarray:
            *outer, rows, columns = shape
            if transposed:
                return rng.standard_normal((*outer, columns, rows), np.float32).mT
            return rng.standard_normal((*outer, rows, columns), np.float32)

        largest: dict[tuple[str, bool], tuple[int, ...]] = {}
        for matmul in matmuls:
            place = matmul.operand, matmul.transposed == "right"
            largest[place] = tuple(map(max, matmul.right, largest.get(place, matmul.right)))
        right = {place: random(shape, transposed=place[1]) for place, shape in largest.items()}
        kinds = {(matmul.left, matmul.transposed == "left") for matmul in matmuls}
        left = {kind: random(kind[0], transposed=kind[1]) for kind in kinds}
        self._pairs = []
        for matmul in matmuls:
            a = left[matmul.left, matmul.transposed == "left"]
            b = right[matmul.operand, matmul.transposed == "right"][..., : matmul.right[-2], : matmul.right[-1]]
            self._pairs.append((a, b))

    def run(self) -> None:
        """Run all matmuls."""
        for left, right in self._pairs:
            left @ right
