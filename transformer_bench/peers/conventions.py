"""What all peers have in common: the methods that ``parity bench`` calls, and which work they can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray

from transformer_spec.config import DEPTHS, SIZES, DropoutRates, TransformerConfig
from transformer_spec.search import SearchResult
from transformer_spec.training_config import TrainingConfig

FREE = (*SIZES, *DEPTHS, "dropout", "pad_id", "bos_id", "eos_id", "label_smoothing")
HANDLED = ("learning_rate_factor", "warmup_steps", "total_steps", "cooldown_steps", "beta1", "beta2", "epsilon")


class Peer:
    """Someone else's Transformer with our weights in it. Nothing is imported before ``prepare``.

    Attributes:
        name: What it is called in tables.
        modules: What has to be installed.
    """

    name: str
    modules: ClassVar[tuple[str, ...]]

    def prepare(self) -> dict[str, str]:
        """Import what is needed, and return versions, device and threads."""
        raise NotImplementedError

    def build(
        self,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        dtype: str = "float32",
        training: TrainingConfig | None = None,
    ) -> None:
        """Build the model, and its optimizer if it is to be trained.

        Args:
            config: The model, of the conventions of preset ``marian``.
            weights: By canonical name; copied.
            dtype: float32, or float64 where the library can.
            training: Learning rate and Adam's settings.

        Raises:
            ValueError: Something is asked for that a peer does not do, or would do in another way than the others.
        """
        check_work(config, training)
        self._config, self._training, self._step = config, training, 0
        self._build(config, weights, dtype, training)

    def _build(self, config: Any, weights: Mapping[str, ndarray], dtype: str, training: TrainingConfig | None) -> None:
        raise NotImplementedError

    def forward(self, source_ids: ndarray, target_ids: ndarray) -> Any:
        """Return the logits [B, T, V] in inference mode, computed when this returns."""
        raise NotImplementedError

    def to_numpy(self, found: Any) -> ndarray:
        """Return the logits as a NumPy array."""
        return np.asarray(found)

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one step of Adam with dropout, and return the loss per target token before it, in nats."""
        if self._training is None:
            raise ValueError("training needs its settings: build(..., training=TrainingConfig())")
        self._step += 1
        rate = self._training.learning_rate(self._step, self._config.d_model)
        return self._train(rate, source_ids, target_ids, labels)

    def _train(self, rate: float, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        raise NotImplementedError

    def greedy(self, source_ids: ndarray, tokens: int) -> SearchResult:
        """Return the result of greedy search with a cache, at most ``tokens`` for each sentence.

        Raises:
            NotImplementedError: The library has no cache.
        """
        raise NotImplementedError


def check_work(config: TransformerConfig, training: TrainingConfig | None) -> None:
    """Raise an error for work that not all peers do in one way.

    Raises:
        ValueError: Conventions other than those of preset ``marian``; dropout on attention weights or in the
            feed-forward network; clipping, accumulation or mixed precision.
    """
    sizes = {name: getattr(config, name) for name in (*SIZES, *DEPTHS) if name not in ("d_k", "d_v")}
    marian = TransformerConfig.preset("marian", **sizes)
    for field in fields(config):
        got, needed = getattr(config, field.name), getattr(marian, field.name)
        if got != needed and (field.name in ("d_k", "d_v") or field.name not in FREE):
            raise ValueError(f"peers have the conventions of preset 'marian', {field.name}={needed!r}: got {got!r}")
    allowed = DropoutRates(embedding=config.dropout.embedding, residual=config.dropout.residual)
    if config.dropout != allowed:
        raise ValueError(f"peers drop embeddings and residuals only: got {config.dropout}")
    if training is not None:
        usual = TrainingConfig()
        for setting in fields(training):
            got, needed = getattr(training, setting.name), getattr(usual, setting.name)
            if setting.name not in HANDLED and got != needed:
                raise ValueError(f"peers train with {setting.name}={needed!r}: got {got!r}")
