"""Planting known mistakes: in a copy of a package, in its config, or in its weights.

A mistake is an edit of a package's source; or a config that the port assumes though nobody asked for it; or weights
that its converter mixes up on the way in and again on the way out, so that they come back as they were given. Planted
in a port, it shows whether the comparison finds it; planted in the reference, it is a hypothesis about a port that
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy import ndarray

from transformer_parity.compare.verdict import DIVERGES

ALL = ("torch", "jax", "tf")  # where mistakes are planted to be found
FOUR = ("numpy", *ALL)

# Where mistakes show: paths of blocks, and taps.
ENCODER, DECODER = "encoder.layers.0", "decoder.layers.0"
SELF, CAUSAL, CROSS = f"{ENCODER}.self_attention", f"{DECODER}.self_attention", f"{DECODER}.cross_attention"
SOURCE, TARGET = "source_embedding.output", "target_embedding.output"

Edit = tuple[str, str, str]  # module, what stands there once, what the mistake makes of it
Edits = Mapping[str, list[Edit]]  # by port
Weights = Mapping[str, ndarray]


@dataclass(frozen=True)
class Mistake:
    """One mistake, or an equivalent way to write the same; and what the comparison must say of it."""

    name: str
    at: str  # the first tap that must fail; empty where none may, and the announcement is all
    edits: Edits = field(default_factory=lambda: {port: [] for port in FOUR}, repr=False)
    case: str = "full/padded"
    dtype: str = "float64"
    verdict: str = DIVERGES
    path: str = "taps"  # fast: the taps agree
    announced: str = ""  # what is said before any tap: taps of other names or order, weights that do not come back
    detail: str = ""  # what is said of the first tap
    own_numbers: tuple[str, ...] = ()  # ports in which it computes what no other does, so that it cannot be named
    unseen: tuple[str, ...] = ()  # dtypes, or other cases, in which the very same mistake raises no alarm
    config: Mapping[str, Any] = field(default_factory=dict)  # what the port assumes instead
    convert: Callable[[Weights], Weights] = field(default=dict, repr=False)  # its own inverse


def instead(module: str, old: str | Mapping[str, str], new: str | None = None, **by_port: str) -> Edits:
    """Return one edit per port: of the same line in all of them, or of each port's own."""
    texts = by_port if new is None else dict.fromkeys(old if isinstance(old, Mapping) else FOUR, new)
    return {port: [(module, old if isinstance(old, str) else old[port], text)] for port, text in texts.items()}


def together(*changes: Edits) -> Edits:
    """Return several edits as one mistake."""
    common = [port for port in changes[0] if all(port in change for change in changes)]
    return {port: [edit for change in changes for edit in change[port]] for port in common}


def in_ports_alone(edits: Edits) -> Edits:
    """Return edits without the reference's: an exception, NaN or mere rounding is not known by its numbers."""
    return {port: edits[port] for port in ALL if port in edits}


def swapped(first: str, second: str) -> Callable[[Weights], Weights]:
    """Return a converter that takes two weights of one shape for each other."""
    return lambda weights: {**weights, first: weights[second], second: weights[first]}


def transposed(name: str) -> Callable[[Weights], Weights]:
    """Return a converter that transposes a square matrix once too often."""
    return lambda weights: {**weights, name: weights[name].T}
