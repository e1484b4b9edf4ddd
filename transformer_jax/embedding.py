"""Embeddings, output projection, and positional encodings (Vaswani et al., 2017, sections 3.4 and 3.5).

Axes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from transformer_jax.layers import Linear
from transformer_spec.checks import check_positions
from transformer_spec.config import TransformerConfig, check_sinusoids
from transformer_spec.shapes import Float, Int


def sinusoidal_encoding(
    length: int, d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
) -> Float[np.ndarray, "L d_model"]:
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
    frequencies = 10000.0 ** (-np.arange(m) / steps)
    angles = np.arange(offset, offset + length)[:, None] * frequencies  # [L, m]
    waves = (np.sin(angles), np.cos(angles))
    if layout == "split":
        return np.concatenate(waves, axis=-1)
    return np.stack(waves, axis=-1).reshape(length, d_model)


class TokenEmbedding(nnx.Embed):
    """Token embedding: one learned vector per token, multiplied by sqrt(d_model) (section 3.4).

    Args:
        vocab_size: Number of tokens in the vocabulary.
        config: Model configuration. If ``config.scale_embedding`` is False, the vectors are not multiplied by
            sqrt(d_model).
        dtype: Name of the dtype of the parameters, such as ``float32``.
        rngs: Flax random state for the initial values and dropout.
    """

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(config.d_model**-0.5)
        super().__init__(vocab_size, config.d_model, param_dtype=dtype, embedding_init=normal, rngs=rngs)
        self.dtype = None  # compute in the dtype of the matrix, as Flax's other layers do by default
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0

    def __call__(self, ids: Int[Array, "B L"]) -> Float[Array, "B L d_model"]:  # type: ignore[override]
        """Return the embedding of each token.

        Args:
            ids: Token IDs.
        """
        return super().__call__(ids) * self.multiplier


class SinusoidalPosition(nnx.Module):
    """Sinusoidal positional encoding, which is added to each vector (section 3.5).

    Args:
        config: Model configuration, which defines the layout, the timescale, and the index of the first position.
        dtype: Not used, because the layer has no parameters.
        rngs: Not used, because the layer has no parameters.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        self.config = config

    def __call__(self, x: Float[Array, "B L d_model"]) -> Float[Array, "B L d_model"]:
        """Return ``x`` plus the encoding of each position. Encodings are computed in float64 and rounded once.

        Args:
            x: One vector per position.
        """
        encoding = self.vectors(x.shape[1])
        return x + jnp.asarray(encoding, x.dtype)

    def vectors(self, length: int) -> Float[np.ndarray, "L d_model"]:
        """Return the vectors that are added at the first ``length`` positions."""
        config = self.config
        return sinusoidal_encoding(
            length, config.d_model, config.position_layout, config.position_timescale, config.position_offset
        )


class LearnedPosition(nnx.Embed):
    """Learned positional embedding, which is added to each vector (Table 3, row E).

    Args:
        config: Model configuration, which defines the number of positions and the index of the first position.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        rngs: Flax random state for the initial values and dropout.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(config.d_model**-0.5)
        super().__init__(config.max_length, config.d_model, param_dtype=dtype, embedding_init=normal, rngs=rngs)
        self.offset = config.position_offset

    def __call__(self, x: Float[Array, "B L d_model"]) -> Float[Array, "B L d_model"]:  # type: ignore[override]
        """Return ``x`` plus the learned vector of each position.

        Args:
            x: One vector per position.
        """
        return x + self.vectors(x.shape[1]).astype(x.dtype)

    def vectors(self, length: int) -> Float[Array, "L d_model"]:
        """Return the vectors that are added at the first ``length`` positions."""
        if isinstance(length, int):  # jax.export can use a symbolic length
            check_positions("length", length, len(self.embedding) - self.offset)
        return self.embedding[self.offset : self.offset + length]


class NoPosition(nnx.Module):
    """Layer that returns its input, for models with relative position biases instead of positional encodings (T5).

    Args:
        config: Model configuration, which defines the size of the vectors.
        dtype: Not used, because the layer has no parameters.
        rngs: Not used, because the layer has no parameters.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        self.d_model = config.d_model

    def __call__(self, x: Float[Array, "B L d_model"]) -> Float[Array, "B L d_model"]:
        """Return ``x``."""
        return x

    def vectors(self, length: int) -> Float[np.ndarray, "L d_model"]:
        """Return zeros in the shape of the vectors that other layers add at the first ``length`` positions."""
        return np.zeros((length, self.d_model))


POSITIONS = {"sinusoidal": SinusoidalPosition, "learned": LearnedPosition, "relative": NoPosition}


def OutputProjection(  # noqa: N802  the name of a layer
    config: TransformerConfig, embedding: TokenEmbedding, dtype: str = "float32", *, rngs: nnx.Rngs
) -> nnx.Linear | TiedProjection:
    """Return a layer that maps each decoder state to one logit per token of the target vocabulary (section 3.4).

    If ``config.ties_output`` is True, the layer is a ``TiedProjection``, which uses the transposed embedding matrix.
    Otherwise, it is an ``nnx.Linear``.

    Args:
        config: Model configuration.
        embedding: Target embedding. If the projection is tied, it uses the matrix of this embedding.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        rngs: Flax random state for the initial values.
    """
    if config.ties_output:
        return TiedProjection(embedding, config.output_bias, dtype)
    return Linear(config.d_model, config.target_vocab_size, bias=config.output_bias, dtype=dtype, rngs=rngs)


class TiedProjection(nnx.Module):
    """Multiplication by a transposed embedding matrix, plus an optional bias.

    Args:
        embedding: Embedding whose matrix the layer uses.
        bias: Whether to add a bias.
        dtype: Dtype of the bias.
    """

    def __init__(self, embedding: TokenEmbedding, bias: bool, dtype: str = "float32") -> None:
        self.embedding = embedding
        self.bias = nnx.Param(jnp.zeros(embedding.num_embeddings, dtype)) if bias else None

    def __call__(self, x: Float[Array, "B L d_model"]) -> Float[Array, "B L V"]:
        """Return the logits of each position.

        Args:
            x: One decoder state per target position.
        """
        logits = self.embedding.attend(x)
        return logits if self.bias is None else logits + self.bias.astype(logits.dtype)
