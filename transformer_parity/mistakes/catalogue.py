"""The whole catalogue of mistakes, by part, and the cases in which they show."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from transformer_parity.cases.case import Case
from transformer_parity.cases.standard import standard_cases
from transformer_parity.mistakes import attention, layers, optimizer, precision, search, structure, training
from transformer_parity.mistakes.mistake import Mistake

FORWARD = {**attention.CATALOGUE, **layers.CATALOGUE}
STRUCTURE = {
    "weights": structure.WEIGHTS,
    "edge cases": structure.EDGES,
    "fully masked rows": attention.FULLY_MASKED,
    "fused kernels": attention.FAST,
    "structure": structure.STRUCTURE,
    "precision": precision.PRECISION,
}
TRAINING = {**training.CATALOGUE, **optimizer.CATALOGUE}
SEARCH = search.CATALOGUE
EVERYWHERE = layers.EVERYWHERE  # only hypotheses


@cache
def parts() -> Mapping[str, list[Mistake]]:
    """Return the whole catalogue, by what the mistakes are about."""
    return {**FORWARD, **STRUCTURE, **TRAINING, "decoding": SEARCH}


@cache
def cases() -> Mapping[str, Case]:
    """Return every case that a mistake may show in, by name."""
    found = {case.name: case for case in [*standard_cases(), attention.FUSED_CASE]}
    return {**found, **training.CASES}
