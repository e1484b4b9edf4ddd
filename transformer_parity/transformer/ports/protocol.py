"""The protocol that every port implements. All methods take and return NumPy arrays."""

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
    """Dtype, device, and matmul precision of a model, as in ``Transformer.from_weights``."""

    dtype: str = "float32"
    device: str = "cpu"
    precision: str = "highest"


@dataclass(frozen=True)
class Placements:
    """Device and matmul precision of the models, and the dtypes to compare."""

    dtypes: Sequence[str] = ALL_DTYPES
    device: str = "cpu"
    precision: str = "highest"

    def placement(self, dtype: str) -> Placement:
        """Return a placement with the given dtype."""
        return Placement(dtype, self.device, self.precision)


@dataclass(frozen=True)
class Decoded:
    """Result of a search for one batch.

    Attributes:
        result: The final hypotheses.
        shown: The unfinished hypotheses after each step n, as one array per step with shape [B, K, n].
    """

    result: SearchResult
    shown: list[ndarray]

    @classmethod
    def by(cls, search: Callable[..., SearchResult]) -> Decoded:
        """Run a search and record the unfinished hypotheses after each step."""
        shown: list[ndarray] = []
        return cls(search(on_step=shown.append), shown)


@dataclass(frozen=True)
class Result:
    """Output of a block, and the values at the block's taps in the order of computation."""

    output: ndarray
    taps: dict[str, ndarray]


class LoadedPort(Protocol):
    """A model with loaded weights."""

    def export(self) -> dict[str, ndarray]:
        """Return all parameters, keyed by canonical name."""

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run one block in inference mode.

        Args:
            block: Path of the block; an empty path selects the full model.
            inputs: Dict from the names of the block's arguments to arrays. Floats are float64, and IDs are integers.
            taps: True to record every tap, False to use the fast path and record none.
            given: Dict from tap names to replacement values. The computed value is still recorded, but the rest of the
                block uses the replacement.
        """

    def shows(self, tap: str) -> bool:
        """Return True if the port reports this tap for every model that contains it."""

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        """Return the loss and its gradients in inference mode for a batch of source_ids, target_ids, and labels."""

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> Result:
        """Decode all target positions one at a time with a cache, and return the logits and taps of all positions."""

    def search(self, source_ids: ndarray, options: Search, on_step: OnStep | None = None) -> SearchResult:
        """Return the best hypotheses for a batch.

        After each step, call ``on_step`` with the unfinished hypotheses.
        """

    def trainer(self, settings: TrainingConfig) -> Any:
        """Return a trainer with the methods ``train_step``, ``evaluate``, ``export_state``, and ``load_state``."""


class AnyPort(Protocol):
    """An implementation of the model."""

    @property
    def name(self) -> str:
        """Display name in reports."""

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], placement: Placement) -> LoadedPort:
        """Build a model with a copy of the weights."""


class MissingFrameworkError(UsageError):
    """A required framework is not installed. The message includes the command that installs it."""
