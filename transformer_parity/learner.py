"""One backend that learns: its model and trainer, with text and NumPy at the boundary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.checkpoint import Checkpoint
from reference_numpy.config import TransformerConfig
from reference_numpy.training_config import StepResult, TrainingConfig
from transformer_parity.batches import Batch
from transformer_parity.ports import PORTS
from transformer_parity.text import Vocabulary

TOGETHER = 128  # sentences that are translated at a time
STRIDE = 16  # lengths are rounded up to this, so that compilers see few different shapes


class Learner:
    """A model of one backend, being trained."""

    def __init__(
        self,
        backend: str,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        settings: TrainingConfig,
        seed: int,
        dtype: str,
        device: str,
        precision: str,
    ) -> None:
        port = PORTS[backend]
        self.package = package = port.import_package()
        self.backend = backend
        self.model = package.Transformer.from_weights(config, weights, dtype, device, precision)
        self.trainer = package.Trainer(self.model, settings, seed)
        self.loaded = port.loaded(package, self.model, dtype)
        self.environment: dict[str, str] = package.describe()

    def train_step(self, batch: Batch) -> StepResult:
        """Take one step; the result need not have been computed yet."""
        return self.trainer.train_step(batch.source_ids, batch.target_ids, batch.labels)

    def validate(self, batches: Iterable[Batch]) -> float:
        """Return the cross-entropy per target token, in nats."""
        sums = [self.trainer.evaluate(batch.source_ids, batch.target_ids, batch.labels) for batch in batches]
        return sum(float(loss) for loss, _ in sums) / max(sum(int(tokens) for _, tokens in sums), 1)

    def translate(self, lines: Sequence[str], vocabulary: Vocabulary, max_length: int) -> list[str]:
        """Translate lines, in order, always taking the likeliest next token."""
        return translate(self.loaded, self.model.config, lines, vocabulary, max_length)

    def set_weights(self, weights: Mapping[str, ndarray]) -> None:
        """Put other weights into the model."""
        self.package.set_weights(self.model, weights)

    def checkpoint(self, progress: dict[str, Any], vocabulary: Vocabulary) -> Checkpoint:
        """Return everything there is to save."""
        return Checkpoint(
            self.model.config,
            self.trainer.settings,
            self.model.export_weights(),
            self.trainer.export_state(),
            progress,
            vocabulary.model,
        )


def translate(
    loaded: Any, config: TransformerConfig, lines: Sequence[str], vocabulary: Vocabulary, max_length: int
) -> list[str]:
    """Translate lines with a loaded port, in order, always taking the likeliest next token.

    Where the model's positions are limited, longer lines are cut off, and so are longer translations.
    """
    numbered = [vocabulary.ids(line, config)[: config.max_positions] for line in lines]
    by_length = sorted(range(len(lines)), key=lambda i: len(numbered[i]))
    found = [""] * len(lines)
    for start in range(0, len(lines), TOGETHER):
        chosen = by_length[start : start + TOGETHER]
        width = _rounded_up(max(len(numbered[i]) for i in chosen), config.max_positions)
        source_ids = np.full((TOGETHER, width), config.pad_id)
        for row, i in enumerate(chosen):
            source_ids[row, : len(numbered[i])] = numbered[i]
        for i, ids in zip(chosen, greedy(loaded, config, source_ids, len(chosen), max_length), strict=False):
            found[i] = vocabulary.text(ids, config)
    return found


def greedy(loaded: Any, config: TransformerConfig, source_ids: ndarray, rows: int, max_length: int) -> list[list[int]]:
    """Return the likeliest next tokens, one after another, of the first rows of a batch."""
    memory = loaded.run("encode", {"source_ids": source_ids}, taps=False).output
    max_length = min(max_length, config.max_positions or max_length)
    ids = np.full((len(source_ids), max_length + 1), config.pad_id)
    ids[:, 0] = config.bos_id
    unfinished = np.arange(len(source_ids)) < rows
    for step in range(max_length):
        width = _rounded_up(step + 1, config.max_positions)
        inputs = {"target_ids": _widened(ids, width, config.pad_id), "memory": memory, "source_ids": source_ids}
        logits = loaded.run("decode", inputs, taps=False).output[:, step]
        ids[:, step + 1] = np.where(unfinished, logits.argmax(-1), config.pad_id)
        unfinished &= ids[:, step + 1] != config.eos_id
        if not unfinished.any():
            break
    return [row[1:].tolist() for row in ids[:rows]]


def _rounded_up(length: int, limit: int | None) -> int:
    rounded = -(-length // STRIDE) * STRIDE
    return rounded if limit is None else min(rounded, limit)


def _widened(ids: ndarray, width: int, pad_id: int) -> ndarray:
    missing = max(width - ids.shape[1], 0)
    return np.pad(ids, ((0, 0), (0, missing)), constant_values=pad_id)[:, :width]
