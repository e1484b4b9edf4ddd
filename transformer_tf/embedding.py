"""Embeddings, output projection, and positional encodings (Vaswani et al., 2017, sections 3.4 and 3.5).

Axes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.checks import check_positions
from transformer_spec.config import TransformerConfig, check_sinusoids
from transformer_spec.shapes import Float, Int
from transformer_tf.block import Block, initial
from transformer_tf.layers import Linear


def sinusoidal_encoding(
    length: int | Int[Tensor, ""], d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
) -> Float[Tensor, "L d_model"]:
    """Return sinusoidal positional encodings, one row per position, in float64 (section 3.5).

    ``PE(pos, 2i) = sin(pos / 10000^(2i/d_model))``, ``PE(pos, 2i+1) = cos(pos / 10000^(2i/d_model))``. In float32, the
    angles would have errors of 4e-5 at position 500.

    Args:
        length: Number of positions.
        d_model: Number of channels. It must be even.
        layout: ``interleaved`` alternates sine and cosine channels, as in the paper. ``split`` puts all sine channels
            first.
        timescale: Spacing of the wavelengths. There are m = d_model / 2 wavelengths, and the shortest is 2 pi. With
            ``m``, as in the paper, the longest wavelength is slightly less than 10000 * 2 pi. With ``m_minus_1``, as in
            tensor2tensor, it is exactly 10000 * 2 pi.
        offset: Index of the first position.

    Raises:
        ValueError: If ``layout`` or ``timescale`` is unknown, or ``d_model`` is odd or too small.
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
    """Token embedding: one learned vector per token, multiplied by sqrt(d_model) (section 3.4).

    Args:
        vocab_size: Number of tokens in the vocabulary.
        config: Model configuration. If ``config.scale_embedding`` is False, the vectors are not multiplied by
            sqrt(d_model).
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.
    """

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.table = keras.layers.ReversibleEmbedding(
            vocab_size, config.d_model, reverse_dtype=self.compute_dtype, **_table(self, config)
        )
        self.table.build()

    def call(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L d_model"]:
        """Return the embedding of each token.

        Args:
            ids: Token IDs.
        """
        return self.table(ids) * self.multiplier


class SinusoidalPosition(Block):
    """Sinusoidal positional encoding, which is added to each vector (section 3.5).

    Args:
        config: Model configuration, which defines the layout, the timescale, and the index of the first position.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.
    """

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.config = config

    def call(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` plus the encoding of each position. Encodings are computed in float64 and rounded once.

        Args:
            x: One vector per position.
        """
        encoding = self.vectors(keras.ops.shape(x)[1])
        return x + tf.cast(encoding, x.dtype)

    def vectors(self, length: int | Int[Tensor, ""]) -> Float[Tensor, "L d_model"]:
        """Return the vectors that are added at the first ``length`` positions."""
        config = self.config
        return sinusoidal_encoding(
            length, config.d_model, config.position_layout, config.position_timescale, config.position_offset
        )


class LearnedPosition(Block):
    """Learned positional embedding, which is added to each vector (Table 3, row E).

    Args:
        config: Model configuration, which defines the number of positions and the index of the first position.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.
    """

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.offset = config.position_offset
        self.table = keras.layers.Embedding(config.max_length, config.d_model, **_table(self, config))
        self.table.build()

    def call(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` plus the learned vector of each position.

        Args:
            x: One vector per position.
        """
        return x + self.vectors(keras.ops.shape(x)[1])

    def vectors(self, length: int | Int[Tensor, ""]) -> Float[Tensor, "L d_model"]:
        """Return the vectors that are added at the first ``length`` positions."""
        if not tf.is_tensor(length):
            check_positions("length", length, self.table.input_dim - self.offset)
        return self.table(tf.range(self.offset, self.offset + length))


class NoPosition(Block):
    """Layer that returns its input, for models with relative position biases instead of positional encodings (T5).

    Args:
        config: Model configuration, which defines the size of the vectors.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.
    """

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.d_model = config.d_model

    def call(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x``."""
        return x

    def vectors(self, length: int | Int[Tensor, ""]) -> Float[Tensor, "L d_model"]:
        """Return zeros in the shape of the vectors that other layers add at the first ``length`` positions."""
        return tf.zeros([length, self.d_model], self.compute_dtype)


POSITIONS = {"sinusoidal": SinusoidalPosition, "learned": LearnedPosition, "relative": NoPosition}


class OutputProjection(Block):
    """Output projection: maps each decoder state to one logit per token of the target vocabulary (section 3.4).

    If ``config.ties_output`` is True, the projection uses the transposed embedding matrix.

    Args:
        config: Model configuration.
        embedding: Target embedding. If the projection is tied, it uses the matrix of this embedding.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.
    """

    def __init__(
        self, config: TransformerConfig, embedding: TokenEmbedding, dtype: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(dtype=dtype, **kwargs)
        size, tied = config.target_vocab_size, config.ties_output
        # Store the layer instead of its matrix, so that Keras saves the matrix only once.
        self.embedding = embedding if tied else None
        self.linear: Any = None if tied else Linear(config.d_model, size, bias=False, dtype=dtype, name=self.name)
        self.bias = self.add_weight(shape=(size,), initializer="zeros", name="bias") if config.output_bias else None

    def call(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L V"]:
        """Return the logits of each position.

        Args:
            x: One decoder state per target position.
        """
        logits = self.linear(x) if self.embedding is None else self.embedding.table(x, reverse=True)
        return logits if self.bias is None else logits + self.bias


def _table(layer: keras.layers.Layer, config: TransformerConfig) -> dict[str, Any]:
    """Return the constructor arguments of an embedding matrix with normally distributed initial values."""
    normal = initial(keras.initializers.RandomNormal(stddev=config.d_model**-0.5))
    return {"embeddings_initializer": normal, "dtype": layer.dtype_policy, "name": layer.name}
