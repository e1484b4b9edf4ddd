"""Embeddings, output projection and positions (Vaswani et al., 2017, sections 3.4 and 3.5).

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from reference_numpy.functional import linear
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float, Int


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
    """
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


class SinusoidalPosition:
    """Add to each vector the sines and cosines of its position (section 3.5)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.config = config
        self._known = np.zeros((0, config.d_model))  # as many rows as were asked for so far

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L d_model"]:
        """Return ``x`` with its positions; the encoding is rounded once, to the dtype of ``x``."""
        return x + self.vectors(x.shape[1]).astype(x.dtype)

    def vectors(self, length: int) -> Float[ndarray, "L d_model"]:
        """Return what is added at each of the first positions."""
        config, known = self.config, self._known  # looked at once: another thread may put more rows there
        if length > len(known):
            known = sinusoidal_encoding(
                length, config.d_model, config.position_layout, config.position_timescale, config.position_offset
            )
            known.flags.writeable = False
            self._known = known
        return known[:length]


class LearnedPosition:
    """Add to each vector a learned vector of its position (Table 3, row E)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.offset = config.position_offset
        self.table = np.zeros((config.max_length, config.d_model), dtype)

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L d_model"]:
        """Return ``x`` with its positions."""
        return x + self.vectors(x.shape[1])

    def vectors(self, length: int) -> Float[ndarray, "L d_model"]:
        """Return what is added at each of the first positions."""
        return self.table[self.offset : self.offset + length]


class OutputProjection:
    """Score every token of the vocabulary; where tied, by the transposed embedding table (section 3.4)."""

    def __init__(self, config: TransformerConfig, embedding: TokenEmbedding, dtype: str = "float32") -> None:
        tied = config.tie_embeddings != "none"
        self.table = embedding.table if tied else None
        self.kernel = None if tied else np.zeros((config.d_model, config.target_vocab_size), dtype)
        self.bias = np.zeros(config.target_vocab_size, dtype) if config.output_bias else None

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L V"]:
        """Return the logits of each position."""
        kernel = self.table.T if self.kernel is None else self.kernel  # type: ignore[union-attr]
        return linear(x, kernel, self.bias)
