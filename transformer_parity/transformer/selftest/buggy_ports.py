"""Ports with an injected bug."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numpy import ndarray

from transformer_parity.transformer.bugs.bug import Bug, Weights
from transformer_parity.transformer.bugs.edited_package import edited_package
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.config import TransformerConfig


class ConvertedModel:
    """A model that converts its weights when they are loaded and when they are exported."""

    def __init__(self, loaded: LoadedPort, convert: Callable[[Weights], Weights]) -> None:
        self.loaded = loaded
        self.convert = convert

    def export(self) -> dict[str, ndarray]:
        """Return all parameters, keyed by canonical name, after undoing the conversion."""
        return dict(self.convert(self.loaded.export()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaded, name)


@dataclass(frozen=True)
class BuggyPort:
    """A port with an injected bug."""

    name: str
    port: PackagePort
    bug: Bug

    def load(self, config: TransformerConfig, weights: Weights, placement: Placement) -> Any:
        """Build a model, with the config and the weights that the bug specifies."""
        loaded = self.port.load(config.replace(**self.bug.config), self.bug.convert(weights), placement)
        return ConvertedModel(loaded, self.bug.convert)

    def import_package(self) -> Any:
        """Return the edited package."""
        return self.port.import_package()


def injected(bug: Bug, backend: str) -> BuggyPort:
    """Inject a bug into a copy of a package, and return a port of this copy. The original port is not modified.

    Raises:
        MissingFrameworkError: If the framework is not installed.
        ValueError: If a text that the bug replaces does not occur exactly once in the package.
    """
    port = PORTS[backend]
    port.import_package()
    package = edited_package(port.package, tuple(bug.edits[backend]))
    fast = port.name != "numpy"  # in NumPy, a bug changes a formula; in other packages, it may change the fast path
    return BuggyPort(backend, replace(port, package=package.__name__, fast=fast), bug)
