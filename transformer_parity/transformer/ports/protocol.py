"""The port protocol: NumPy arrays go in and come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy import ndarray

from transformer_parity.engine.system.errors import UsageError
from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_spec.config import TransformerConfig
from transformer_spec.search import OnStep, Search, SearchResult
from transformer_spec.training_config import Gradients, TrainingConfig


class Placement(NamedTuple):
    """In which dtype, on which device and how precisely a model computes: see ``Transformer.from_weights``."""

    dtype: str = "float32"
    device: str = "cpu"
    precision: str = "highest"


@dataclass(frozen=True)
class Placements:
    """Where and how models run, in each of several dtypes."""

    dtypes: Sequence[str] = ALL_DTYPES
    device: str = "cpu"
    precision: str = "highest"

    def placement(self, dtype: str) -> Placement:
        """Return where a model in one of the dtypes runs."""
        return Placement(dtype, self.device, self.precision)


@dataclass(frozen=True)
class Decoded:
    """What a port found for a batch, and what it had in hand after each step."""

    result: SearchResult
    shown: list[ndarray]  # [B, K, n]

    @classmethod
    def by(cls, search: Callable[..., SearchResult]) -> Decoded:
        """Run a search and keep what it shows."""
        shown: list[ndarray] = []
        return cls(search(on_step=shown.append), shown)


@dataclass(frozen=True)
class Result:
    """What a block returned, and what its taps saw, in the order they fired."""

    output: ndarray
    taps: dict[str, ndarray]


class LoadedPort(Protocol):
    """A model that holds weights."""

    def export(self) -> dict[str, ndarray]:
        """Return every parameter by its canonical name."""

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run one block in inference mode.

        Args:
            block: The path of the block; empty for the whole model.
            inputs: Arrays by the name of the block's argument. Floats arrive in float64, ids as integers.
            taps: True records every tap; False runs the way a user runs it for speed, and records none.
            given: What to go on with behind a tap, by its name, in place of what was computed and recorded.
        """

    def shows(self, tap: str) -> bool:
        """Whether the port promises to show a tap, where the model has it."""

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        """Return the loss of a batch (source_ids, target_ids, labels) and its gradients, in inference mode."""

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> Result:
        """Return logits and taps of all target positions, decoded one after another with a cache."""

    def search(self, source_ids: ndarray, options: Search, on_step: OnStep | None = None) -> SearchResult:
        """Return the best hypotheses of a batch, and show those that are unfinished after each step."""

    def trainer(self, settings: TrainingConfig) -> Any:
        """Return what trains this model, with ``train_step``, ``evaluate``, ``export_state`` and ``load_state``."""


class Implementation(Protocol):
    """An implementation of the model."""

    @property
    def name(self) -> str:
        """What it is called in tables."""

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], placement: Placement) -> LoadedPort:
        """Build a model that holds a copy of the weights."""


class MissingFrameworkError(UsageError):
    """A framework that was asked for is not installed; the message has the install line."""
