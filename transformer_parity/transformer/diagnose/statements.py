"""Statements that describe a difference and its evidence, the strongest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy import ndarray

from transformer_parity.engine.localization import Evidence
from transformer_parity.engine.tensors import given
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY, UNKNOWN, Diagnosis
from transformer_parity.transformer.diagnose.evidence.closeness import SAME
from transformer_parity.transformer.diagnose.evidence.signatures import other_kernel, places, signatures

# How to declare what a port does if it is a convention.
IN_PORT = "fix it or, if it is intentional, declare it in the port: overrides = {!r}"
IN_FILES = (
    "fix it or, if it is intentional, write A for this convention, which is then in the config of its manifest: "
    "`parity golden --for module:Class --out A`, for a class with overrides = {!r}"
)
FAR = {"float64": SAME, "float32": 1e-5}  # relative: more than rounding


def of_names(found: Diagnosis, detail: str) -> Diagnosis:
    """Say first that the port shows different tensors than it declared."""
    promise = f"what is shown is not what was promised: {detail}"
    if found.confidence == EXACT:
        return replace(found, signatures=(promise, *found.signatures))
    return replace(found, sentence=f"{promise}. Besides, {found.sentence}")


def of_error(evidence: Evidence, case: Case) -> list[str]:
    """Return statements about the error of the first wrong block."""
    name, dtype = evidence.blame.introduced[0], evidence.blame.dtype
    if name not in evidence.alone or name not in evidence.wanted:
        return []
    weights = given(case.load_weights(), dtype)
    config = case.config.in_decoder if "decoder." in name else case.config
    batch = case if name.startswith("of ") else None
    kernel = other_kernel(name, evidence.alone, evidence.wanted, weights)
    found = [kernel] if kernel else []
    for rows in _sentences(case, evidence.wanted[name]):
        alone, wanted = evidence.alone[name], evidence.wanted[name]
        if rows is not None and alone.shape == wanted.shape:
            alone, wanted = alone[rows], wanted[rows]
        found = found or signatures(alone, wanted, config, weights, FAR[dtype], batch)
    return [f"{_at(name)}, {statement}" for statement in found]


def _sentences(case: Case, tensor: ndarray) -> list[ndarray | None]:
    """Return the rows without padding, and None for all rows: at padding, a port has the reference's values."""
    ids = [array for name, array in case.inputs.items() if name in ("source_ids", "target_ids")]
    whole = np.all([(array != case.config.pad_id).all(1) for array in ids], 0) if ids else np.zeros(0, bool)
    if tensor.shape[:1] != whole.shape or not whole.any() or whole.all():
        return [None]
    return [whole, None]


def with_statements(found: Diagnosis, statements: Sequence[str], evidence: Evidence) -> Diagnosis:
    """Add statements to a diagnosis, followed by the places that are wrong.

    If no hypothesis was found, the first statement becomes the diagnosis. A place never does.
    """
    found = with_first(found, statements, evidence.blame.dtype)
    return replace(found, signatures=(*found.signatures, *wrong_places(evidence)))


def wrong_places(evidence: Evidence | None) -> list[str]:
    """Return which sentences, heads and positions are wrong at the first place of introduction, if others are right."""
    if evidence is None or not evidence.blame.introduced:
        return []
    name, far = evidence.blame.introduced[0], FAR[evidence.blame.dtype]
    if name not in evidence.alone or name not in evidence.wanted:
        return []
    return [f"{_at(name)}, {words}" for words in places(evidence.alone[name], evidence.wanted[name], far)]


def _at(name: str) -> str:
    """Return a tap, or the name of a gradient, as the place of a statement."""
    return f"in the gradient {name}" if name.startswith(("at ", "of ")) else f"at {name}"


def if_it_is_meant(found: Diagnosis, remedy: str) -> Diagnosis:
    """Add how to declare what a port does, if it is a convention."""
    return replace(found, signatures=(remedy.format(found.config), *found.signatures)) if found.config else found


def with_first(found: Diagnosis, statements: Sequence[str], dtype: str = "float64") -> Diagnosis:
    """Add statements: if no hypothesis was found, the first one becomes the diagnosis."""
    if found.confidence == UNKNOWN and statements:
        first, *rest = statements
        closer = [found.sentence.partition(". ")[2]] if ". With " in found.sentence else []
        sentence = f"no known mistake fits; {first}"
        if dtype == "float32":
            sentence = f"{first}: if float64 agrees, only precision is lost"
        found, statements = replace(found, sentence=sentence, confidence=LIKELY), [*rest, *closer]
    return replace(found, signatures=(*found.signatures, *statements))
