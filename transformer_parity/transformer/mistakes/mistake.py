"""A known mistake, as data: edits of a package's source, another config, or weights that are mixed up.

A mistake of the config is one that the port assumes in place of the given one. A mistake of the weights is a
conversion on the way in and again on the way out, so that they come back as they were given. Planted in a port, a
mistake tests the comparison; planted in the reference, it is a hypothesis about a port that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from numpy import ndarray

from transformer_parity.engine.findings import DIVERGES

ALL = ("torch", "jax", "tf")  # the ports that are compared with the reference
FOUR = ("numpy", *ALL)

# Blocks and taps at which mistakes show.
ENCODER, DECODER = "encoder.layers.0", "decoder.layers.0"
SELF, CAUSAL, CROSS = f"{ENCODER}.self_attention", f"{DECODER}.self_attention", f"{DECODER}.cross_attention"
SOURCE, TARGET = "source_embedding.output", "target_embedding.output"

Edit = tuple[str, str, str]  # module, text that occurs there once, text in its place
Edits = Mapping[str, list[Edit]]  # by port
Change = tuple[str, str]  # text that occurs once, text in its place
Weights = Mapping[str, ndarray]


@dataclass(frozen=True)
class Mistake:
    """One mistake, or an equivalent way to write the same; and the failure that the comparison must report."""

    name: str
    at: str  # the first tap that must fail; empty where none may, or where the model raises
    edits: Edits = field(default_factory=lambda: {port: [] for port in FOUR}, repr=False)
    case: str = "full/padded"
    dtype: str = "float64"
    verdict: str = DIVERGES
    path: str = "taps"  # fast: with taps on, the result is right; run: the model raises
    announced: str = ""  # a failure before any tap: names or order of the taps, weights that do not come back
    detail: str = ""  # part of the detail of the first tap that fails
    own_numbers: tuple[str, ...] = ()  # ports whose numbers differ from those of all others: no name
    unseen: tuple[str, ...] = ()  # dtypes, or other cases, in which the same mistake raises no alarm
    config: Mapping[str, Any] = field(default_factory=dict)  # fields of the config that the port assumes
    convert: Callable[[Weights], Weights] = field(default=dict, repr=False)  # its own inverse


Entry = Edits | partial[Mistake]
Table = Mapping[Any, Mapping[str, Entry]]  # by the tap that must fail, with the case where it is another; by name


def but(edits: Edits | None = None, **more: Any) -> partial[Mistake]:
    """Return an entry of a table that is more than edits, or something else."""
    return partial(Mistake, **more) if edits is None else partial(Mistake, edits=edits, **more)


def table(entries: Table, **common: Any) -> list[Mistake]:
    """Return the mistakes of a table; what they have in common, an entry may replace."""
    found = []
    for place, named in entries.items():
        at, case = (place, {}) if isinstance(place, str) else (place[0], {"case": place[1]})
        for name, entry in named.items():
            make = entry if isinstance(entry, partial) else but(entry)
            found.append(make(name, at, **{**common, **case, **make.keywords}))
    return found


def changed(module: str, usual: Change | None = None, **others: Change) -> Edits:
    """Return one edit for each port that has a line of its own, and the usual one, if there is any, for all others."""
    changes = {**(dict.fromkeys(FOUR, usual) if usual else {}), **others}
    return {port: [(module, *change)] for port, change in changes.items()}


def instead(module: str, old: str | Mapping[str, str], new: str | None = None, **by_port: str) -> Edits:
    """Return one edit per port, of the same line in all of them or of a line of each port."""
    texts = by_port if new is None else dict.fromkeys(old if isinstance(old, Mapping) else FOUR, new)
    return {port: [(module, old if isinstance(old, str) else old[port], text)] for port, text in texts.items()}


def together(*changes: Edits) -> Edits:
    """Return several edits as one mistake."""
    common = [port for port in changes[0] if all(port in change for change in changes)]
    return {port: [edit for change in changes for edit in change[port]] for port in common}


def in_ports_alone(edits: Edits) -> Edits:
    """Return edits without the reference's: numbers do not identify an exception, NaN or rounding."""
    return {port: edits[port] for port in ALL if port in edits}


def swapped(first: str, second: str) -> Callable[[Weights], Weights]:
    """Return a conversion that exchanges two weights of one shape."""
    return lambda weights: {**weights, first: weights[second], second: weights[first]}


def transposed(name: str) -> Callable[[Weights], Weights]:
    """Return a conversion that transposes a square matrix."""
    return lambda weights: {**weights, name: weights[name].T}
