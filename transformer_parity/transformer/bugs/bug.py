"""A known bug as data: edits to a package's source, a wrong config, or a wrong conversion of the weights.

A bug in the config replaces fields of the given config. A bug in the weights converts the weights when they are loaded
and converts them back when they are exported, so the exported weights look correct. A bug that is injected into a port
tests the comparison. A bug that is injected into the reference is a candidate for diagnosing a port that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from numpy import ndarray

from transformer_parity.engine.findings import DIVERGES

ALL = ("torch", "jax", "tf")  # the packages that are compared with the reference
FOUR = ("numpy", *ALL)

# Blocks and taps at which bugs have their first effects.
ENCODER, DECODER = "encoder.layers.0", "decoder.layers.0"
SELF, CAUSAL, CROSS = f"{ENCODER}.self_attention", f"{DECODER}.self_attention", f"{DECODER}.cross_attention"
SOURCE, TARGET = "source_embedding.output", "target_embedding.output"

Edit = tuple[str, str, str]  # module, text that occurs exactly once in it, replacement
Edits = Mapping[str, list[Edit]]  # backend to edits
Change = tuple[str, str]  # text that occurs exactly once, replacement
Weights = Mapping[str, ndarray]


@dataclass(frozen=True)
class Bug:
    """A bug and the failure that the comparison must report, or an equivalent formulation that must agree."""

    name: str
    at: str  # first tap that must fail; empty if no tap should fail or if the model raises an exception
    edits: Edits = field(default_factory=lambda: {port: [] for port in FOUR}, repr=False)
    case: str = "full/padded"
    dtype: str = "float64"
    verdict: str = DIVERGES
    path: str = "taps"  # "fast" if only runs without taps are wrong, "run" if the model raises an exception
    announced: str = ""  # failure reported before any tap: wrong names or order of taps, or wrong exported weights
    detail: str = ""  # part of the message about the first tap that fails
    own_numbers: tuple[str, ...] = ()  # backends whose values differ from all others, so the bug can't be identified
    unseen: tuple[str, ...] = ()  # dtypes and cases in which the bug has no effect
    config: Mapping[str, Any] = field(default_factory=dict)  # config fields that the port replaces
    convert: Callable[[Weights], Weights] = field(default=dict, repr=False)  # conversion that is its own inverse


Entry = Edits | partial[Bug]
Table = Mapping[Any, Mapping[str, Entry]]  # tap that must fail, or pair of tap and case, to entries by name


def but(edits: Edits | None = None, **more: Any) -> partial[Bug]:
    """Return a table entry with additional attributes, with or without edits."""
    return partial(Bug, **more) if edits is None else partial(Bug, edits=edits, **more)


def table(entries: Table, **common: Any) -> list[Bug]:
    """Return the bugs in a table. ``common`` sets attributes for all of them, which an entry may override."""
    found = []
    for place, named in entries.items():
        at, case = (place, {}) if isinstance(place, str) else (place[0], {"case": place[1]})
        for name, entry in named.items():
            make = entry if isinstance(entry, partial) else but(entry)
            found.append(make(name, at, **{**common, **case, **make.keywords}))
    return found


def changed(module: str, usual: Change | None = None, **others: Change) -> Edits:
    """Return one edit per backend: ``usual`` for all backends, except those with a different edit in ``others``."""
    changes = {**(dict.fromkeys(FOUR, usual) if usual else {}), **others}
    return {port: [(module, *change)] for port, change in changes.items()}


def instead(module: str, old: str | Mapping[str, str], new: str | None = None, **by_port: str) -> Edits:
    """Return one edit per backend. ``old`` is the same text for all backends, or a dict with the text for each."""
    texts = by_port if new is None else dict.fromkeys(old if isinstance(old, Mapping) else FOUR, new)
    return {port: [(module, old if isinstance(old, str) else old[port], text)] for port, text in texts.items()}


def together(*changes: Edits) -> Edits:
    """Combine multiple sets of edits into one bug."""
    common = [port for port in changes[0] if all(port in change for change in changes)]
    return {port: [edit for change in changes for edit in change[port]] for port in common}


def in_ports_alone(edits: Edits) -> Edits:
    """Return the edits without the reference, for bugs that values can't identify: exceptions, NaN, and rounding."""
    return {port: edits[port] for port in ALL if port in edits}


def swapped(first: str, second: str) -> Callable[[Weights], Weights]:
    """Return a conversion that swaps two weights of the same shape."""
    return lambda weights: {**weights, first: weights[second], second: weights[first]}


def transposed(name: str) -> Callable[[Weights], Weights]:
    """Return a conversion that transposes a square matrix."""
    return lambda weights: {**weights, name: weights[name].T}
