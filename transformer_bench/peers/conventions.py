"""The interface of all peers: the methods that ``parity bench`` calls, and a check that peers support a workload.

Each peer is written in the style of its library, using the library's building blocks. A library is imported only when
its peer is used.
"""

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
    """A Transformer based on a different library, with the same weights. ``prepare`` imports the library.

    Attributes:
        name: The name shown in tables.
        modules: The modules that must be installed.
    """

    name: str
    modules: ClassVar[tuple[str, ...]]

    def prepare(self) -> dict[str, str]:
        """Import the library, and return its version, the device, and the number of threads."""
        raise NotImplementedError

    def build(
        self,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        dtype: str = "float32",
        training: TrainingConfig | None = None,
    ) -> None:
        """Build the model and, if it will be trained, the optimizer.

        Args:
            config: The config, which must use the conventions of the ``marian`` preset.
            weights: The weights to copy, keyed by canonical name.
            dtype: float32, or float64 if the library supports it.
            training: The learning rate and Adam settings; None for inference.

        Raises:
            ValueError: If a peer doesn't support the workload, or if the results of two peers would differ.
        """
        check_work(config, training)
        self._config, self._training, self._step = config, training, 0
        self._build(config, weights, dtype, training)

    def _build(self, config: Any, weights: Mapping[str, ndarray], dtype: str, training: TrainingConfig | None) -> None:
        raise NotImplementedError

    def forward(self, source_ids: ndarray, target_ids: ndarray) -> Any:
        """Compute the logits [B, T, V] in inference mode, wait until the computation is complete, and return them."""
        raise NotImplementedError

    def to_numpy(self, found: Any) -> ndarray:
        """Return the logits as a NumPy array."""
        return np.asarray(found)

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Run one Adam step with dropout, and return the loss per target token before the update, in nats."""
        if self._training is None:
            raise ValueError("training requires settings; use build(..., training=TrainingConfig())")
        self._step += 1
        rate = self._training.learning_rate(self._step, self._config.d_model)
        return self._train(rate, source_ids, target_ids, labels)

    def _train(self, rate: float, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        raise NotImplementedError

    def greedy(self, source_ids: ndarray, tokens: int) -> SearchResult:
        """Return the result of greedy search with a cache, generating at most ``tokens`` tokens per sentence.

        Raises:
            NotImplementedError: If the library has no cache.
        """
        raise NotImplementedError


def check_work(config: TransformerConfig, training: TrainingConfig | None) -> None:
    """Check that all peers support the given workload and produce the same results.

    Raises:
        ValueError: If the config doesn't use the conventions of the ``marian`` preset, if dropout applies to attention
            weights or the feed-forward network, or if training uses clipping, accumulation, or mixed precision.
    """
    sizes = {name: getattr(config, name) for name in (*SIZES, *DEPTHS) if name not in ("d_k", "d_v")}
    marian = TransformerConfig.preset("marian", **sizes)
    for field in fields(config):
        got, needed = getattr(config, field.name), getattr(marian, field.name)
        if got != needed and (field.name in ("d_k", "d_v") or field.name not in FREE):
            raise ValueError(f"peers support only the 'marian' preset, with {field.name}={needed!r}: got {got!r}")
    allowed = DropoutRates(embedding=config.dropout.embedding, residual=config.dropout.residual)
    if config.dropout != allowed:
        raise ValueError(f"peers support dropout only for embeddings and residuals: got {config.dropout}")
    if training is not None:
        usual = TrainingConfig()
        for setting in fields(training):
            got, needed = getattr(training, setting.name), getattr(usual, setting.name)
            if setting.name not in HANDLED and got != needed:
                raise ValueError(f"peers support training only with {setting.name}={needed!r}: got {got!r}")
