"""A port with one known mistake in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numpy import ndarray

from transformer_parity.transformer.mistakes.edited_package import edited_package
from transformer_parity.transformer.mistakes.mistake import Mistake, Weights
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.config import TransformerConfig


class ConvertedModel:
    """A model whose weights are converted on the way in, and again on the way out; all else is the model's own."""

    def __init__(self, loaded: LoadedPort, convert: Callable[[Weights], Weights]) -> None:
        self.loaded = loaded
        self.convert = convert

    def export(self) -> dict[str, ndarray]:
        """Return every parameter by its canonical name, as it was given."""
        return dict(self.convert(self.loaded.export()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaded, name)


@dataclass(frozen=True)
class PlantedPort:
    """A port with one mistake in it."""

    name: str
    port: PackagePort
    mistake: Mistake

    def load(self, config: TransformerConfig, weights: Weights, placement: Placement) -> Any:
        """Build a model, perhaps of another config than the given one, or of weights that are mixed up."""
        loaded = self.port.load(config.replace(**self.mistake.config), self.mistake.convert(weights), placement)
        return ConvertedModel(loaded, self.mistake.convert)

    def import_package(self) -> Any:
        """Return the package with the mistake in it."""
        return self.port.import_package()


def planted(mistake: Mistake, backend: str) -> PlantedPort:
    """Return one of our four ports with a mistake in it; the port itself stays as it is.

    Raises:
        MissingFrameworkError: The framework is not installed.
        ValueError: A text that the mistake replaces does not occur once in the package.
    """
    port = PORTS[backend]
    port.import_package()
    package = edited_package(port.package, tuple(mistake.edits[backend]))
    fast = port.name != "numpy"  # the catalog edits formulas of the reference, and what users run of the others
    return PlantedPort(backend, replace(port, package=package.__name__, fast=fast), mistake)
