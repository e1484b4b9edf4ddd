"""The complete bug catalog, grouped by part of the model, and the cases that expose the bugs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from transformer_parity.transformer.bugs import (
    attention,
    layers,
    optimizer,
    other_optimizers,
    precision,
    reported,
    reported_training,
    search,
    structure,
    t5,
    training,
)
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.bugs.candidates import by_hand, forward, step_variants
from transformer_parity.transformer.bugs.candidates import search as search_candidates
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.cases.standard import standard_cases

Parts = Mapping[str, list[Bug]]


def merged(*catalogs: Parts) -> Parts:
    """Merge multiple catalogs. For each part, the result contains one list with the bugs from all catalogs."""
    names = dict.fromkeys(name for catalog in catalogs for name in catalog)
    return {name: [bug for catalog in catalogs for bug in catalog.get(name, [])] for name in names}


FORWARD = {**merged(attention.CATALOG, layers.CATALOG, reported.CATALOG), "T5": t5.T5}
STRUCTURE = merged(
    {
        "weights": structure.WEIGHTS,
        "edge cases": structure.EDGES,
        "fully masked rows": attention.FULLY_MASKED,
        "fused kernels": attention.FAST,
        "structure": structure.STRUCTURE,
        "precision": precision.PRECISION,
    },
    reported.STRUCTURE,
)
TRAINING = merged(training.CATALOG, optimizer.CATALOG, reported_training.CATALOG, other_optimizers.CATALOG)
SEARCH = [*search.CATALOG, *reported_training.SEARCH, *t5.SEARCH]
# The diagnosis tries the following bugs as candidates, but the mutation test doesn't inject them into ports.
EVERYWHERE = [*layers.EVERYWHERE, *reported.EVERYWHERE]
CANDIDATES = forward.CANDIDATES
STEP_VARIANTS = step_variants.STEP_VARIANTS
SEARCH_CANDIDATES = [*search.ONLY_CANDIDATES, *search_candidates.SEARCHES]
BACKWARD_BLOCKS, BACKWARD_PATHS, LOSSES = by_hand.BLOCKS, by_hand.PATHS, by_hand.LOSSES


@cache
def parts() -> Parts:
    """Return the complete catalog, grouped by part of the model."""
    return {**FORWARD, **STRUCTURE, **TRAINING, "decoding": SEARCH}


@cache
def cases() -> Mapping[str, Case]:
    """Return the cases in which the bugs of the catalog can be detected, as a dict from name to case."""
    found = {case.name: case for case in [*standard_cases(), attention.FUSED_CASE]}
    return {**found, **training.CASES}
