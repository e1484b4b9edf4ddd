"""Embeddings, output projection and positions (Vaswani et al., 2017, sections 3.4 and 3.5).

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from torch import Tensor, nn

from reference_numpy.config import TransformerConfig
from transformer_torch.layers import linear

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def sinusoidal_encoding(
    length: int,
    d_model: int,
    layout: str = "interleaved",
    timescale: str = "m",
    offset: int = 0,
    *,
    device: torch.device | None = None,
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
        device: Where to compute; None is torch's default.
    """
    m = d_model // 2
    steps = m if timescale == "m" else m - 1
    frequencies = 10000.0 ** (-torch.arange(m, dtype=torch.float64, device=device) / steps)
    positions = torch.arange(offset, offset + length, device=device)
    angles = positions[:, None] * frequencies  # [L, m]
    waves = (angles.sin(), angles.cos())
    if layout == "split":
        return torch.cat(waves, dim=-1)
    return torch.stack(waves, dim=-1).flatten(-2)


class TokenEmbedding(nn.Module):
    """Look up one learned vector per token, times sqrt(d_model) (section 3.4)."""

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: str = "float32") -> None:
        super().__init__()
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.table = _normal_table(vocab_size, config.d_model, dtype)

    def forward(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L d_model"]:
        """Return the vectors of the tokens."""
        return F.embedding(ids, self.table) * self.multiplier


class SinusoidalPosition(nn.Module):
    """Add to each vector the sines and cosines of its position (section 3.5)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` with its positions; the encoding is rounded once, to the dtype of ``x``."""
        encoding = self.vectors(x.shape[1], x.device)
        return x + encoding.to(x.dtype)

    def vectors(self, length: int, device: torch.device | None = None) -> Float[Tensor, "L d_model"]:
        """Return what is added at each of the first positions."""
        config = self.config
        return sinusoidal_encoding(
            length,
            config.d_model,
            config.position_layout,
            config.position_timescale,
            config.position_offset,
            device=device,
        )


class LearnedPosition(nn.Module):
    """Add to each vector a learned vector of its position (Table 3, row E)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        super().__init__()
        self.offset = config.position_offset
        self.table = _normal_table(config.max_length, config.d_model, dtype)

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` with its positions."""
        return x + self.vectors(x.shape[1])

    def vectors(self, length: int, device: torch.device | None = None) -> Float[Tensor, "L d_model"]:
        """Return what is added at each of the first positions."""
        return self.table[self.offset : self.offset + length]


class OutputProjection(nn.Module):
    """Score every token of the vocabulary; where tied, by the transposed embedding table (section 3.4)."""

    relaid: Tensor | None = None  # the matrix in another layout, while ``laid_out_for_few_rows`` lasts

    def __init__(self, config: TransformerConfig, embedding: TokenEmbedding, dtype: str = "float32") -> None:
        super().__init__()
        tied = config.tie_embeddings != "none"
        shape, torch_dtype = embedding.table.shape, getattr(torch, dtype)
        self.weight = embedding.table if tied else nn.Parameter(torch.empty(shape, dtype=torch_dtype))
        self.bias = nn.Parameter(torch.zeros(shape[0], dtype=torch_dtype)) if config.output_bias else None
        if not tied:
            nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L V"]:
        """Return the logits of each position."""
        relaid = self.relaid
        return linear(x, self.weight if relaid is None else relaid, self.bias)


def _normal_table(rows: int, d_model: int, dtype: str) -> nn.Parameter:
    table = torch.empty(rows, d_model, dtype=getattr(torch, dtype))
    return nn.Parameter(table if table.is_meta else nn.init.normal_(table, std=d_model**-0.5))
