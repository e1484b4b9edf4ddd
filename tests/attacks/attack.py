"""The class ``Attack``, and the correct port from which attacks through ports are derived."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy import ndarray

from attacks.words import FAILS, INCOMPLETE, REFUSED
from transformer_parity.transformer.cases.case import ACTIVATIONS, Case
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.ports.templates.other_port import MyPort
from transformer_parity.transformer.ports.user import Port
from transformer_parity.transformer.stages.registry import STAGES
from transformer_spec.config import TransformerConfig
from transformer_spec.taps import matches
from transformer_spec.training_config import Gradients

PORT, FILES, OPTIONS, PLACES, PAIRS = "port", "files", "options", "places", "pairs"
BUSY = 60.0  # seconds without a message after which the process of a port is stopped


@dataclass(frozen=True)
class Attack:
    """One attack on the verdict AGREE.

    Attributes:
        name: A short name that is unique within the family.
        what: A description in one or two sentences.
        expected: ``fails`` (a divergence or a loss of precision), ``incomplete``, ``agrees`` (the attack is harmless),
            or ``fails or incomplete``.
        family: How the attack reaches the comparison: ``port``, ``files``, ``options``, ``places``, or ``pairs``.
        inject: A port as ``module:class``, or a function that runs the attack and returns the exit code and the output.
        says: Text that the output must contain.
        stages: The requested stages.
        cases: Function that returns the cases for a config. None selects every case of ``stages``.
        separate: Whether the attack runs in a separate process because it may end or modify the process.
        timeout: Seconds without a message after which that process is stopped.
        needs: Modules that must be installed.
    """

    name: str
    what: str
    expected: str
    family: str
    inject: Any = field(repr=False)
    says: str = ""
    stages: tuple[str, ...] = tuple(STAGES)
    cases: Callable[[TransformerConfig], Sequence[Case]] | None = None
    separate: bool = False
    timeout: float = BUSY
    needs: tuple[str, ...] = ()

    def expects(self, verdict: str, said: str) -> bool:
        """Return whether the verdict is expected and the output contains ``says``."""
        verdicts = (FAILS, INCOMPLETE) if self.expected == REFUSED else (self.expected,)
        return verdict in verdicts and self.says in said


PORTS: list[Attack] = []  # in the order of their definitions


def attack(expected: str, **options: Any) -> Callable[[type[Port]], type[Port]]:
    """Return a decorator that adds a port to the table, with its docstring as the description."""

    def add(port: type[Port]) -> type[Port]:
        what = " ".join((port.__doc__ or "").split())
        PORTS.append(Attack(port.__name__, what, expected, PORT, f"{port.__module__}:{port.__name__}", **options))
        return port

    return add


def inject(module: str, name: str, expected: str, what: str, methods: Mapping[str, Any], **options: Any) -> None:
    """Add a port to the table and to a module that differs from ``Sound`` in some methods or attributes."""
    port = type(name, (Sound,), {"__doc__": what, "__module__": module, **methods})
    setattr(sys.modules[module], name, attack(expected, **options)(port))


def padded(config: TransformerConfig) -> list[Case]:
    """Return the case that reveals most attacks, in a list."""
    return [case for case in port_cases(config, (ACTIVATIONS,)) if case.name == "full/padded"]


def showing(show: Callable[[Any, str, ndarray], Any]) -> Callable[..., ndarray]:
    """Return a forward pass that calls ``show(tap, name, value)`` at each tap and continues with ``value``."""

    def forward(self: Any, source_ids: ndarray, target_ids: ndarray, tap: Any) -> ndarray:
        def seen(name: str, value: ndarray) -> ndarray:
            show(tap, name, value)
            return value

        return Sound.forward(self, source_ids, target_ids, seen)

    return forward


class Sound(MyPort):
    """The reference as a port, which supports everything and agrees."""

    taps: tuple[str, ...] = ("**",)  # type: ignore[assignment]

    def gradients(self, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
        """Return the loss and the gradients, with gradients only at promised taps."""
        found = super().gradients(source_ids, target_ids, labels)
        shown = {name: x for name, x in found.taps.items() if any(matches(pattern, name) for pattern in self.taps)}
        return replace(found, taps=shown)
