"""Embeddings, output projection and positions (Vaswani et al., 2017, sections 3.4 and 3.5).

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import keras
import tensorflow as tf
from tensorflow import Tensor

from reference_numpy.config import TransformerConfig
from reference_numpy.functional import linear

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def sinusoidal_encoding(
    length: int, d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
) -> Float[Tensor, "L d_model"]:
    """Return one row of sines and cosines of the position per position, in float64.

    Section 3.5: ``PE(pos, 2i) = sin(pos / 10000^(2i/d_model))``, ``PE(pos, 2i+1) = cos(...)``. The angles need
    float64 whatever the model's dtype: in float32 they are wrong by 4e-5 at position 500.

    Args:
        length: How many positions.
        d_model: How many channels; even.
        layout: ``interleaved`` alternates sine and cosine (the paper), ``split`` puts all sines first.
        timescale: ``m`` spaces m = d_model / 2 wavelengths from 2 pi up to but not including 10000 * 2 pi (the
            paper), ``m_minus_1`` includes it (tensor2tensor).
        offset: The number of the first position.
    """
    m = d_model // 2
    steps = m if timescale == "m" else m - 1
    frequencies = 10000.0 ** (-np.arange(m) / steps)
    angles = np.arange(offset, offset + length)[:, None] * frequencies  # [L, m]
    waves = (np.sin(angles), np.cos(angles))
    if layout == "split":
        return np.concatenate(waves, axis=-1)
    return np.stack(waves, axis=-1).reshape(length, d_model)


class TokenEmbedding(keras.layers.Layer):
    """Look up one learned vector per token, times sqrt(d_model) (section 3.4)."""

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: str = "float32", **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.table = np.zeros((vocab_size, config.d_model), dtype=dtype)

    def call(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L d_model"]:
        """Return the vectors of the tokens."""
        return self.table[ids] * self.multiplier


class SinusoidalPosition(keras.layers.Layer):
    """Encode each position by sines and cosines of it (section 3.5)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32", **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.config = config
        self.dtype = dtype

    def call(self, length: int) -> Float[Tensor, "L d_model"]:
        """Return the encoding of the first ``length`` positions, rounded once to the model's dtype."""
        config = self.config
        encoding = sinusoidal_encoding(
            length, config.d_model, config.position_layout, config.position_timescale, config.position_offset
        )
        return encoding.astype(self.dtype)


class LearnedPosition(keras.layers.Layer):
    """Look up one learned vector per position (Table 3, row E)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32", **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.offset = config.position_offset
        self.table = np.zeros((config.max_length, config.d_model), dtype=dtype)

    def call(self, length: int) -> Float[Tensor, "L d_model"]:
        """Return the vectors of the first ``length`` positions."""
        return self.table[self.offset : self.offset + length]


class OutputProjection(keras.layers.Layer):
    """Score every token of the vocabulary; where tied, by the transposed embedding table (section 3.4)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32", **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        tied = config.tie_embeddings != "none"
        self.kernel = None if tied else np.zeros((config.d_model, config.target_vocab_size), dtype=dtype)
        self.bias = np.zeros(config.target_vocab_size, dtype=dtype) if config.output_bias else None

    def call(
        self, x: Float[Tensor, "B L d_model"], embedding: TokenEmbedding
    ) -> Float[Tensor, "B L V"]:
        """Return the logits of each position."""
        kernel = embedding.table.T if self.kernel is None else self.kernel
        return linear(x, kernel, self.bias)
