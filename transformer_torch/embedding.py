"""Embeddings, output projection and positions (Vaswani et al., 2017, sections 3.4 and 3.5).

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from transformer_spec.config import TransformerConfig, check_sinusoids
from transformer_spec.shapes import Float, Int
from transformer_torch.layers import Linear
from transformer_torch.runtime import to_dtype


def sinusoidal_encoding(
    length: int, d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
) -> Float[Tensor, "L d_model"]:
    """Return one row of sines and cosines per position, in float64.

    Section 3.5: ``PE(pos, 2i) = sin(pos / 10000^(2i/d_model))``, ``PE(pos, 2i+1) = cos(...)``. In float32, the angles
    would be wrong by 4e-5 at position 500.

    Args:
        length: Number of positions.
        d_model: Number of channels; even.
        layout: ``interleaved`` alternates sine and cosine (the paper), ``split`` has all sines first.
        timescale: ``m`` spaces m = d_model / 2 wavelengths from 2 pi up to but not including 10000 * 2 pi (the
            paper), ``m_minus_1`` includes it (tensor2tensor).
        offset: Number of the first position.

    Raises:
        ValueError: If there is no such layout or timescale, or ``d_model`` doesn't fit it.
    """
    check_sinusoids(d_model, layout, timescale)
    m = d_model // 2
    steps = m if timescale == "m" else m - 1
    frequencies = 10000.0 ** (-torch.arange(m, dtype=torch.float64, device="cpu") / steps)
    angles = torch.arange(offset, offset + length, device="cpu")[:, None] * frequencies  # [L, m]
    waves = (angles.sin(), angles.cos())
    if layout == "split":
        return torch.cat(waves, dim=-1)
    return torch.stack(waves, dim=-1).flatten(-2)


class TokenEmbedding(nn.Embedding):
    """Look up one learned vector per token, times sqrt(d_model) (section 3.4)."""

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__(vocab_size, config.d_model, dtype=to_dtype(dtype))
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_scale = self.multiplier  # peft scales an adapter's vectors by this

    def reset_parameters(self) -> None:
        """Draw normal values with the standard deviation 1 / sqrt(d_model)."""
        _draw_table(self.weight)

    def forward(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L d_model"]:
        """Return the vectors of the tokens."""
        return F.embedding(ids, self.weight) * self.multiplier

    def extra_repr(self) -> str:
        """Return its sizes, as torch prints them."""
        return f"{super().extra_repr()}, multiplier={self.multiplier:g}"


class SinusoidalPosition(nn.Module):
    """Add to each vector the sines and cosines of its position (section 3.5)."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
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


class LearnedPosition(nn.Embedding):
    """Add to each vector a learned vector of its position (Table 3, row E)."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__(config.max_length, config.d_model, dtype=to_dtype(dtype))
        self.offset = config.position_offset

    def reset_parameters(self) -> None:
        """Draw normal values with the standard deviation 1 / sqrt(d_model)."""
        _draw_table(self.weight)

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` with its positions."""
        return x + self.vectors(x.shape[1])

    def vectors(self, length: int) -> Float[Tensor, "L d_model"]:
        """Return what is added at each of the first positions."""
        return self.weight[self.offset : self.offset + length]

    def extra_repr(self) -> str:
        """Return its sizes, as torch prints them."""
        return f"{super().extra_repr()}, offset={self.offset}"


def OutputProjection(  # noqa: N802  the name of a layer
    config: TransformerConfig, embedding: TokenEmbedding, dtype: torch.dtype | str = "float32"
) -> nn.Module:
    """Return a layer that scores every token of the vocabulary, if tied with the embedding matrix (section 3.4)."""
    if config.tie_embeddings == "none":
        return Linear(config.d_model, config.target_vocab_size, bias=config.output_bias, dtype=dtype)
    return TiedProjection(embedding, config.output_bias)


class TiedProjection(nn.Module):
    """Multiply by a transposed embedding matrix, and add a bias.

    The matrix is a parameter of the embedding only, so the two stay tied however its values, dtype or device change.
    This is not an ``nn.Linear``: a tool that replaces or merges linear layers would change the embedding too.
    """

    def __init__(self, embedding: TokenEmbedding, bias: bool) -> None:
        super().__init__()
        self.embedding: TokenEmbedding
        vars(self)["embedding"] = embedding  # not registered as a child, which would list its parameter twice
        weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(len(weight), dtype=weight.dtype)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The embedding matrix; to use a different one, replace this layer by an ``nn.Linear``."""
        return self.embedding.weight

    def reset_parameters(self) -> None:
        """Set the bias to zero."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L V"]:
        """Return the logits of each position."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return its sizes, as torch prints them."""
        out_features, in_features = self.weight.shape
        return f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}, tied"


def _draw_table(weight: Tensor) -> None:
    if not weight.is_meta:  # where drawing would import SymPy
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
