"""Embeddings, output projection and positions (Vaswani et al., 2017, sections 3.4 and 3.5).

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.config import TransformerConfig, check_sinusoids
from transformer_spec.shapes import Float, Int
from transformer_tf.block import Block, initial
from transformer_tf.layers import Linear


def sinusoidal_encoding(
    length: int | Int[Tensor, ""], d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
) -> Float[Tensor, "L d_model"]:
    """Return one row of sines and cosines per position, in float64 (section 3.5).

    ``PE(pos, 2i) = sin(pos / 10000^(2i/d_model))``, ``PE(pos, 2i+1) = cos(...)``.

    Args:
        length: Number of positions.
        d_model: Number of channels, which is even.
        layout: ``interleaved`` alternates sine and cosine (the paper), ``split`` puts all sines first.
        timescale: ``m`` spaces m = d_model / 2 wavelengths from 2 pi up to but not including 10000 * 2 pi (the paper),
            ``m_minus_1`` includes it.
        offset: Number of the first position.

    Raises:
        ValueError: If there is no such layout or timescale, or ``d_model`` doesn't fit it.
    """
    check_sinusoids(d_model, layout, timescale)
    m = d_model // 2
    steps = m if timescale == "m" else m - 1
    frequencies = tf.constant(10000.0 ** (-np.arange(m) / steps), tf.float64)
    angles = tf.cast(tf.range(offset, offset + length), tf.float64)[:, None] * frequencies  # [L, m]
    waves = (tf.sin(angles), tf.cos(angles))
    if layout == "split":
        return tf.concat(waves, axis=-1)
    return tf.reshape(tf.stack(waves, axis=-1), [length, d_model])


class TokenEmbedding(Block):
    """Look up one learned vector per token, times sqrt(d_model) (section 3.4)."""

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.table = keras.layers.ReversibleEmbedding(
            vocab_size, config.d_model, reverse_dtype=self.compute_dtype, **_table(self, config)
        )
        self.table.build()

    def call(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L d_model"]:
        """Return the vectors of the tokens."""
        return self.table(ids) * self.multiplier


class SinusoidalPosition(Block):
    """Add to each vector the sines and cosines of its position (section 3.5)."""

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.config = config

    def call(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` with its positions; the encoding is rounded once, to the dtype of ``x``."""
        encoding = self.vectors(keras.ops.shape(x)[1])
        return x + tf.cast(encoding, x.dtype)

    def vectors(self, length: int | Int[Tensor, ""]) -> Float[Tensor, "L d_model"]:
        """Return what is added at each of the first positions."""
        config = self.config
        return sinusoidal_encoding(
            length, config.d_model, config.position_layout, config.position_timescale, config.position_offset
        )


class LearnedPosition(Block):
    """Add to each vector a learned vector of its position (Table 3, row E)."""

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.offset = config.position_offset
        self.table = keras.layers.Embedding(config.max_length, config.d_model, **_table(self, config))
        self.table.build()

    def call(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` with its positions."""
        return x + self.vectors(keras.ops.shape(x)[1])

    def vectors(self, length: int | Int[Tensor, ""]) -> Float[Tensor, "L d_model"]:
        """Return what is added at each of the first positions."""
        return self.table(tf.range(self.offset, self.offset + length))


class OutputProjection(Block):
    """Score every token of the vocabulary; where tied, by the transposed embedding table (section 3.4)."""

    def __init__(
        self, config: TransformerConfig, embedding: TokenEmbedding, dtype: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(dtype=dtype, **kwargs)
        size, tied = config.target_vocab_size, config.tie_embeddings != "none"
        self.embedding = embedding if tied else None  # the layer, as Keras saves it once
        self.linear: Any = None if tied else Linear(config.d_model, size, bias=False, dtype=dtype, name=self.name)
        self.bias = self.add_weight(shape=(size,), initializer="zeros", name="bias") if config.output_bias else None

    def call(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L V"]:
        """Return the logits of each position."""
        logits = self.linear(x) if self.embedding is None else self.embedding.table(x, reverse=True)
        return logits if self.bias is None else logits + self.bias


def _table(layer: keras.layers.Layer, config: TransformerConfig) -> dict[str, Any]:
    """Return the options of a layer's table of normally distributed vectors."""
    normal = initial(keras.initializers.RandomNormal(stddev=config.d_model**-0.5))
    return {"embeddings_initializer": normal, "dtype": layer.dtype_policy, "name": layer.name}
