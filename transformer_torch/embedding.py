"""Embeddings, output projection and positions (Vaswani et al., 2017, sections 3.4 and 3.5).

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float, Int


def sinusoidal_encoding(
    length: int, d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
) -> Float[Tensor, "L d_model"]:
    """Return one row of sines and cosines of the position per position, in float64.

    Arguments, result and errors as in ``reference_numpy.sinusoidal_encoding``.
    """
    m = d_model // 2
    steps = m if timescale == "m" else m - 1
    frequencies = 10000.0 ** (-torch.arange(m, dtype=torch.float64, device="cpu") / steps)
    angles = torch.arange(offset, offset + length, device="cpu")[:, None] * frequencies  # [L, m]
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

    def extra_repr(self) -> str:
        """Return its sizes, as torch prints them."""
        return f"{', '.join(map(str, self.table.shape))}, multiplier={self.multiplier:g}"


class SinusoidalPosition(nn.Module):
    """Add to each vector the sines and cosines of its position (section 3.5)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` with its positions; the encoding is rounded once, to the dtype of ``x``."""
        encoding = self.vectors(x.shape[1])
        return x + encoding.to(x)

    def vectors(self, length: int) -> Float[Tensor, "L d_model"]:
        """Return what is added at each of the first positions."""
        config = self.config
        return sinusoidal_encoding(
            length, config.d_model, config.position_layout, config.position_timescale, config.position_offset
        )

    def extra_repr(self) -> str:
        """Return its conventions, as torch prints them."""
        config = self.config
        conventions = config.position_layout, config.position_timescale
        return f"{config.d_model}, {', '.join(map(repr, conventions))}, offset={config.position_offset}"


class LearnedPosition(nn.Module):
    """Add to each vector a learned vector of its position (Table 3, row E)."""

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        super().__init__()
        self.offset = config.position_offset
        self.table = _normal_table(config.max_length, config.d_model, dtype)

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` with its positions."""
        return x + self.vectors(x.shape[1])

    def vectors(self, length: int) -> Float[Tensor, "L d_model"]:
        """Return what is added at each of the first positions."""
        return self.table[self.offset : self.offset + length]

    def extra_repr(self) -> str:
        """Return its sizes, as torch prints them."""
        return f"{', '.join(map(str, self.table.shape))}, offset={self.offset}"


class OutputProjection(nn.Module):
    """Score every token of the vocabulary; where tied, by the transposed embedding table (section 3.4)."""

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
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return its sizes, as torch prints them."""
        out_features, in_features = self.weight.shape
        return f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}"


def _normal_table(rows: int, d_model: int, dtype: str) -> nn.Parameter:
    table = torch.empty(rows, d_model, dtype=getattr(torch, dtype))
    return nn.Parameter(table if table.is_meta else nn.init.normal_(table, std=d_model**-0.5))
