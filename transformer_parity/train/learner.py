"""A model and its trainer in one backend, with text and NumPy at the boundary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy import ndarray

from reference_numpy.checkpoint import Checkpoint
from reference_numpy.config import TransformerConfig
from reference_numpy.training_config import StepResult, TrainingConfig
from transformer_parity.ports.protocol import Placement, SearchOptions
from transformer_parity.ports.registry import PORTS
from transformer_parity.text.vocabulary import Vocabulary
from transformer_parity.train.batches import Batch
from transformer_parity.translate.translator import Translator

GREEDY = SearchOptions()


class Learner:
    """A model of one backend, being trained."""

    def __init__(
        self,
        backend: str,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        settings: TrainingConfig,
        seed: int,
        placement: Placement,
    ) -> None:
        port = PORTS[backend]
        self.package = package = port.import_package()
        self.backend = backend
        self.model = package.Transformer.from_weights(config, weights, *placement)
        self.trainer = package.Trainer(self.model, settings, seed)
        self.loaded = port.loaded(package, self.model, placement)
        self.environment: dict[str, str] = package.describe()

    def train_step(self, batch: Batch) -> StepResult:
        """Take one step; the result may still be computed by the device."""
        return self.trainer.train_step(batch.source_ids, batch.target_ids, batch.labels)

    def validate(self, batches: Iterable[Batch]) -> float:
        """Return the cross-entropy per target token, in nats."""
        sums = [self.trainer.evaluate(batch.source_ids, batch.target_ids, batch.labels) for batch in batches]
        return sum(float(loss) for loss, _ in sums) / max(sum(int(tokens) for _, tokens in sums), 1)

    def translate(
        self, lines: Sequence[str], vocabulary: Vocabulary, max_length: int, search: SearchOptions = GREEDY
    ) -> list[str]:
        """Translate lines, in order; one that is longer than the model's positions is left empty."""
        config = self.model.config
        most = search.max_length or max_length
        search = replace(search, max_length=min(most, config.max_positions or most))
        translator = Translator(config, vocabulary, search, window=len(lines))
        return [translation.text for translation in translator.translate(self.loaded, lines)]

    def set_weights(self, weights: Mapping[str, ndarray]) -> None:
        """Put other weights into the model."""
        self.package.set_weights(self.model, weights)

    def checkpoint(self, progress: dict[str, Any], vocabulary: bytes) -> Checkpoint:
        """Return everything there is to save."""
        return Checkpoint(
            self.model.config,
            self.trainer.settings,
            self.model.export_weights(),
            self.trainer.export_state(),
            progress,
            vocabulary,
        )
