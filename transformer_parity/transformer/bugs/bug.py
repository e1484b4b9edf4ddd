"""Definition of a known bug: edits to a package's source code, an incorrect config, or an incorrect weight conversion.

A config bug replaces fields of the config that is passed to the port. A weight bug converts the weights when the port
loads them and converts them back when the port exports them, so the exported weights look correct. Bugs are injected
into ports to test whether the comparison finds them. They are also injected into the reference as candidates for the
diagnosis: if the modified reference reproduces a port's values, the port probably has the same bug.
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

# Names of blocks and taps to which many entries of the catalog refer.
ENCODER, DECODER = "encoder.layers.0", "decoder.layers.0"
SELF, CAUSAL, CROSS = f"{ENCODER}.self_attention", f"{DECODER}.self_attention", f"{DECODER}.cross_attention"
SOURCE, TARGET = "source_embedding.output", "target_embedding.output"

Edit = tuple[str, str, str]  # name of a module, text that occurs exactly once in it, and the replacement for this text
Edits = Mapping[str, list[Edit]]  # maps the name of each backend to its edits
Change = tuple[str, str]  # text that occurs exactly once in a module, and the replacement for this text
Weights = Mapping[str, ndarray]


@dataclass(frozen=True)
class Bug:
    """A change to an implementation: either a bug to detect, or an equivalent formulation that must pass.

    For a bug, the attributes also describe the failure that the comparison must report.
    """

    name: str
    at: str  # first tap that must fail; empty if no tap should fail or if the model raises an exception
    edits: Edits = field(default_factory=lambda: {port: [] for port in FOUR}, repr=False)
    case: str = "full/padded"
    dtype: str = "float64"
    verdict: str = DIVERGES
    path: str = "taps"  # "fast" if the bug affects only runs without taps, "run" if the model raises an exception
    announced: str = ""  # start of the message about wrong tap names, wrong tap order, or wrong exported weights
    detail: str = ""  # text that the message about the first failing tap must contain
    own_numbers: tuple[str, ...] = ()  # backends whose values the reference can't reproduce, even if it has this bug
    unseen: tuple[str, ...] = ()  # dtypes and cases in which the bug has no effect
    config: Mapping[str, Any] = field(default_factory=dict)  # config fields that the port replaces
    convert: Callable[[Weights], Weights] = field(default=dict, repr=False)  # must be its own inverse


Entry = Edits | partial[Bug]
Table = Mapping[Any, Mapping[str, Entry]]  # maps a tap, or a tuple (tap, case), to a dict from bug names to entries


def but(edits: Edits | None = None, **more: Any) -> partial[Bug]:
    """Return a table entry that contains attributes of a bug and, if ``edits`` is given, the edits of the bug."""
    return partial(Bug, **more) if edits is None else partial(Bug, edits=edits, **more)


def table(entries: Table, **common: Any) -> list[Bug]:
    """Convert a table to a list of bugs.

    ``common`` contains attributes that apply to every bug. Individual entries can override them.
    """
    found = []
    for place, named in entries.items():
        at, case = (place, {}) if isinstance(place, str) else (place[0], {"case": place[1]})
        for name, entry in named.items():
            make = entry if isinstance(entry, partial) else but(entry)
            found.append(make(name, at, **{**common, **case, **make.keywords}))
    return found


def changed(module: str, usual: Change | None = None, **others: Change) -> Edits:
    """Return one edit per backend: the backend's edit in ``others`` if there is one, and ``usual`` otherwise."""
    changes = {**(dict.fromkeys(FOUR, usual) if usual else {}), **others}
    return {port: [(module, *change)] for port, change in changes.items()}


def instead(module: str, old: str | Mapping[str, str], new: str | None = None, **by_port: str) -> Edits:
    """Return one edit per backend that replaces ``old``.

    ``old`` is either one text for all backends or a dict that maps the name of each backend to its text. ``new`` is the
    replacement for all backends. If ``new`` isn't given, ``by_port`` contains the replacement for each backend.
    """
    texts = by_port if new is None else dict.fromkeys(old if isinstance(old, Mapping) else FOUR, new)
    return {port: [(module, old if isinstance(old, str) else old[port], text)] for port, text in texts.items()}


def together(*changes: Edits) -> Edits:
    """Combine the edits of multiple changes. The result contains only the backends that all of the changes support."""
    common = [port for port in changes[0] if all(port in change for change in changes)]
    return {port: [edit for change in changes for edit in change[port]] for port in common}


def in_ports_alone(edits: Edits) -> Edits:
    """Return only the edits to the ports, without the edits to the reference.

    The diagnosis then doesn't try the bug as a candidate. Use this function for bugs that cause exceptions, NaN, or
    rounding errors, because the diagnosis can't recognize these bugs by the values that a port returns.
    """
    return {port: edits[port] for port in ALL if port in edits}


def swapped(first: str, second: str) -> Callable[[Weights], Weights]:
    """Return a conversion that swaps two weights of the same shape."""
    return lambda weights: {**weights, first: weights[second], second: weights[first]}


def transposed(name: str) -> Callable[[Weights], Weights]:
    """Return a conversion that transposes a square matrix."""
    return lambda weights: {**weights, name: weights[name].T}
