"""Embeddings, output projection and positions (Vaswani et al., 2017, sections 3.4 and 3.5).

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from reference_numpy.functional import linear, linear_backward
from transformer_spec.config import TransformerConfig, check_sinusoids
from transformer_spec.shapes import Float, Int
from transformer_spec.taps import Tap


def sinusoidal_encoding(
    length: int, d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
) -> Float[ndarray, "L d_model"]:
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

    Raises:
        ValueError: If there is no such layout or timescale, or ``d_model`` does not fit it.
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


class TokenEmbedding:
    """Look up one learned vector per token, times sqrt(d_model) (section 3.4)."""

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: str = "float32") -> None:
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.table = np.zeros((vocab_size, config.d_model), dtype)

    def __call__(self, ids: Int[ndarray, "B L"]) -> Float[ndarray, "B L d_model"]:
        """Return the vectors of the tokens."""
        return self.table[ids] * self.multiplier

    def backward(
        self, ids: Int[ndarray, "B L"], dvectors: Float[ndarray, "B L d_model"], dtable: Float[ndarray, "V d_model"]
    ) -> None:
        """Add to the gradient with respect to the table: each row gets the sum over the positions of its token."""
        np.add.at(dtable, ids, self.multiplier * dvectors)


class SinusoidalPosition:
    """Add to each vector the sines and cosines of its position (section 3.5)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.config = config

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L d_model"]:
        """Return ``x`` with its positions; the encoding is rounded once, to the dtype of ``x``."""
        return x + self.vectors(x.shape[1]).astype(x.dtype)

    def vectors(self, length: int) -> Float[ndarray, "L d_model"]:
        """Return what is added at each of the first positions."""
        config = self.config
        return sinusoidal_encoding(
            length, config.d_model, config.position_layout, config.position_timescale, config.position_offset
        )


class LearnedPosition:
    """Add to each vector a learned vector of its position (Table 3, row E)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.offset = config.position_offset
        self.table = np.zeros((config.max_length, config.d_model), dtype)

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L d_model"]:
        """Return ``x`` with its positions."""
        return x + self.vectors(x.shape[1])

    def backward(self, dy: Float[ndarray, "B L d_model"]) -> Float[ndarray, "max_length d_model"]:
        """Return the gradient with respect to the table. The gradient with respect to ``x`` is ``dy`` itself."""
        dtable = np.zeros_like(self.table)
        dtable[self.offset : self.offset + dy.shape[1]] = dy.sum(axis=0)
        return dtable

    def vectors(self, length: int) -> Float[ndarray, "L d_model"]:
        """Return what is added at each of the first positions."""
        return self.table[self.offset : self.offset + length]


class OutputProjection:
    """Score every token of the vocabulary; where tied, by the transposed embedding table (section 3.4)."""

    def __init__(self, config: TransformerConfig, embedding: TokenEmbedding, dtype: str = "float32") -> None:
        tied = config.tie_embeddings != "none"
        self.embedding = embedding if tied else None
        self.kernel = None if tied else np.zeros((config.d_model, config.target_vocab_size), dtype)
        self.bias = np.zeros(config.target_vocab_size, dtype) if config.output_bias else None

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L V"]:
        """Return the logits of each position."""
        return linear(x, self._matrix, self.bias)

    def backward(
        self, x: Float[ndarray, "B L d_model"], dlogits: Float[ndarray, "B L V"], tap: Tap
    ) -> tuple[Float[ndarray, "B L d_model"], Float[ndarray, "V d_model"] | None]:
        """Return the gradients with respect to ``x`` and to a tied table, or None. The tap receives the others."""
        dx, dkernel, dbias = linear_backward(x, self._matrix, dlogits)
        if self.bias is not None:
            tap("bias", dbias)
        if self.kernel is None:
            return dx, dkernel.T
        tap("kernel", dkernel)
        return dx, None

    @property
    def _matrix(self) -> Float[ndarray, "d_model V"]:
        """The matrix that maps a state to logits."""
        return self.embedding.table.T if self.embedding is not None else self.kernel  # type: ignore[return-value]
