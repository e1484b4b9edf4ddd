"""Embeddings, output projection and positions (Vaswani et al., 2017, sections 3.4 and 3.5).

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from transformer_jax.initial import initial
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float, Int


def sinusoidal_encoding(
    length: int, d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
) -> Float[np.ndarray, "L d_model"]:
    """Return one row of sines and cosines of the position per position, in float64.

    Arguments, result and errors as in ``reference_numpy.sinusoidal_encoding``.
    """
    m = d_model // 2
    steps = m if timescale == "m" else m - 1
    frequencies = 10000.0 ** (-np.arange(m) / steps)
    angles = np.arange(offset, offset + length)[:, None] * frequencies  # [L, m]
    waves = (np.sin(angles), np.cos(angles))
    if layout == "split":
        return np.concatenate(waves, axis=-1)
    return np.stack(waves, axis=-1).reshape(length, d_model)


class TokenEmbedding(nnx.Module):
    """Look up one learned vector per token, times sqrt(d_model) (section 3.4)."""

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.table = _normal_table(vocab_size, config.d_model, dtype, rngs)

    def __call__(self, ids: Int[Array, "B L"]) -> Float[Array, "B L d_model"]:
        """Return the vectors of the tokens."""
        return self.table[ids] * self.multiplier


class SinusoidalPosition(nnx.Module):
    """Add to each vector the sines and cosines of its position (section 3.5)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        self.config = config

    def __call__(self, x: Float[Array, "B L d_model"]) -> Float[Array, "B L d_model"]:
        """Return ``x`` with its positions; the encoding is rounded once, to the dtype of ``x``."""
        encoding = self.vectors(x.shape[1])
        return x + jnp.asarray(encoding, x.dtype)

    def vectors(self, length: int) -> Float[np.ndarray, "L d_model"]:
        """Return what is added at each of the first positions."""
        config = self.config
        return sinusoidal_encoding(
            length, config.d_model, config.position_layout, config.position_timescale, config.position_offset
        )


class LearnedPosition(nnx.Module):
    """Add to each vector a learned vector of its position (Table 3, row E)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        self.offset = config.position_offset
        self.table = _normal_table(config.max_length, config.d_model, dtype, rngs)

    def __call__(self, x: Float[Array, "B L d_model"]) -> Float[Array, "B L d_model"]:
        """Return ``x`` with its positions."""
        return x + self.vectors(x.shape[1])

    def vectors(self, length: int) -> Float[Array, "L d_model"]:
        """Return what is added at each of the first positions."""
        return self.table[self.offset : self.offset + length]


class OutputProjection(nnx.Module):
    """Score every token of the vocabulary; where tied, by the transposed embedding table (section 3.4)."""

    def __init__(
        self, config: TransformerConfig, embedding: TokenEmbedding, dtype: str = "float32", *, rngs: nnx.Rngs
    ) -> None:
        shape = (config.d_model, config.target_vocab_size)
        xavier, zeros = initial(nnx.initializers.xavier_uniform()), initial(nnx.initializers.zeros)
        tied = config.tie_embeddings != "none"
        self.table = embedding.table if tied else None
        self.kernel = None if tied else nnx.Param(xavier(rngs.params(), shape, dtype))
        self.bias = nnx.Param(zeros(rngs.params(), shape[1:], dtype)) if config.output_bias else None
        self.dtype = dtype  # of the computation, as in nnx.Linear

    def __call__(self, x: Float[Array, "B L d_model"]) -> Float[Array, "B L V"]:
        """Return the logits of each position."""
        logits = x.astype(self.dtype) @ self._matrix
        return logits if self.bias is None else logits + self.bias.astype(self.dtype)

    @property
    def _matrix(self) -> Float[Array, "d_model V"]:
        """The matrix that maps a state to logits."""
        matrix = self.table.T if self.kernel is None else self.kernel[...]  # type: ignore[union-attr]
        return matrix.astype(self.dtype)


def _normal_table(rows: int, d_model: int, dtype: str, rngs: nnx.Rngs) -> nnx.Param:
    normal = initial(nnx.initializers.normal(d_model**-0.5))
    return nnx.Param(normal(rngs.params(), (rows, d_model), dtype))
