"""The whole catalogue of mistakes, by part, and the cases in which they show."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from transformer_parity.cases.case import Case
from transformer_parity.cases.standard import standard_cases
from transformer_parity.mistakes import forward, optimizer, precision, search, structure, training
from transformer_parity.mistakes.mistake import Mistake

TRAINING = {**training.CATALOGUE, **optimizer.CATALOGUE}


@cache
def parts() -> Mapping[str, list[Mistake]]:
    """Return the whole catalogue, by what the mistakes are about."""
    return {
        **forward.CATALOGUE,
        "weights": structure.WEIGHTS,
        "edge cases": structure.EDGES,
        "fully masked rows": precision.FULLY_MASKED,
        "fused kernels": precision.FAST,
        "structure": structure.STRUCTURE,
        "precision": precision.PRECISION,
        **TRAINING,
        "decoding": search.CATALOGUE,
    }


@cache
def cases() -> Mapping[str, Case]:
    """Return every case that a mistake may show in, by name."""
    found = {case.name: case for case in [*standard_cases(), precision.FUSED_CASE]}
    return {**found, **training.CASES}
