"""Embeddings, output projection and positions (Vaswani et al., 2017, sections 3.4 and 3.5).

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from transformer_jax.layers import Linear
from transformer_spec.config import TransformerConfig, check_sinusoids
from transformer_spec.shapes import Float, Int


def sinusoidal_encoding(
    length: int, d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
) -> Float[np.ndarray, "L d_model"]:
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
    frequencies = 10000.0 ** (-np.arange(m) / steps)
    angles = np.arange(offset, offset + length)[:, None] * frequencies  # [L, m]
    waves = (np.sin(angles), np.cos(angles))
    if layout == "split":
        return np.concatenate(waves, axis=-1)
    return np.stack(waves, axis=-1).reshape(length, d_model)


class TokenEmbedding(nnx.Embed):
    """Look up one learned vector per token, times sqrt(d_model) (section 3.4)."""

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(config.d_model**-0.5)
        super().__init__(vocab_size, config.d_model, param_dtype=dtype, embedding_init=normal, rngs=rngs)
        self.dtype = None  # compute in the dtype of the matrix, as Flax's other layers do by default
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0

    def __call__(self, ids: Int[Array, "B L"]) -> Float[Array, "B L d_model"]:  # type: ignore[override]
        """Return the vectors of the tokens."""
        return super().__call__(ids) * self.multiplier


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


class LearnedPosition(nnx.Embed):
    """Add to each vector a learned vector of its position (Table 3, row E)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(config.d_model**-0.5)
        super().__init__(config.max_length, config.d_model, param_dtype=dtype, embedding_init=normal, rngs=rngs)
        self.offset = config.position_offset

    def __call__(self, x: Float[Array, "B L d_model"]) -> Float[Array, "B L d_model"]:  # type: ignore[override]
        """Return ``x`` with its positions."""
        return x + self.vectors(x.shape[1]).astype(x.dtype)

    def vectors(self, length: int) -> Float[Array, "L d_model"]:
        """Return the vectors of the first positions."""
        return self.embedding[self.offset : self.offset + length]


def OutputProjection(  # noqa: N802  the name of a layer
    config: TransformerConfig, embedding: TokenEmbedding, dtype: str = "float32", *, rngs: nnx.Rngs
) -> nnx.Linear | TiedProjection:
    """Return a layer that scores every token of the vocabulary, if tied with the embedding matrix (section 3.4)."""
    if config.tie_embeddings == "none":
        return Linear(config.d_model, config.target_vocab_size, bias=config.output_bias, dtype=dtype, rngs=rngs)
    return TiedProjection(embedding, config.output_bias, dtype)


class TiedProjection(nnx.Module):
    """Multiply by a transposed embedding matrix, and add a bias."""

    def __init__(self, embedding: TokenEmbedding, bias: bool, dtype: str = "float32") -> None:
        self.embedding = embedding
        self.bias = nnx.Param(jnp.zeros(embedding.num_embeddings, dtype)) if bias else None

    def __call__(self, x: Float[Array, "B L d_model"]) -> Float[Array, "B L V"]:
        """Return the logits of each position."""
        logits = self.embedding.attend(x)
        return logits if self.bias is None else logits + self.bias.astype(logits.dtype)
