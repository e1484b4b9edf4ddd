"""Embeddings, output projection, and positional encodings (Vaswani et al., 2017, sections 3.4 and 3.5).

Axes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from transformer_spec.checks import check_positions
from transformer_spec.config import TransformerConfig, check_sinusoids
from transformer_spec.shapes import Float, Int
from transformer_torch.layers import Linear
from transformer_torch.runtime import to_dtype


def sinusoidal_encoding(
    length: int, d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
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
    frequencies = 10000.0 ** (-torch.arange(m, dtype=torch.float64, device="cpu") / steps)
    angles = torch.arange(offset, offset + length, device="cpu")[:, None] * frequencies  # [L, m]
    waves = (angles.sin(), angles.cos())
    if layout == "split":
        return torch.cat(waves, dim=-1)
    return torch.stack(waves, dim=-1).flatten(-2)


class TokenEmbedding(nn.Embedding):
    """Token embedding: one learned vector per token, multiplied by sqrt(d_model) (section 3.4).

    Args:
        vocab_size: Number of tokens in the vocabulary.
        config: Model configuration. If ``config.scale_embedding`` is False, the vectors are not multiplied by
            sqrt(d_model).
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.
    """

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__(vocab_size, config.d_model, dtype=to_dtype(dtype))
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0

    @property
    def embed_scale(self) -> float:
        """The same value as ``multiplier``, for the peft library. To change the value, set ``multiplier``."""
        return self.multiplier

    def reset_parameters(self) -> None:
        """Initialize the embeddings from a normal distribution with standard deviation 1 / sqrt(d_model)."""
        _draw_table(self.weight)

    def forward(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L d_model"]:
        """Return the embedding of each token.

        Args:
            ids: Token IDs.
        """
        return F.embedding(ids, self.weight) * self.multiplier

    def extra_repr(self) -> str:
        """Return the settings that ``print(model)`` shows for this module."""
        return f"{super().extra_repr()}, multiplier={self.multiplier:g}"


class SinusoidalPosition(nn.Module):
    """Sinusoidal positional encoding, which is added to each vector (section 3.5).

    Args:
        config: Model configuration, which defines the layout, the timescale, and the index of the first position.
        dtype: Not used, because the layer has no parameters.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` plus the encoding of each position. Encodings are computed in float64 and rounded once.

        Args:
            x: One vector per position.
        """
        encoding = self.vectors(x.shape[1])
        return x + encoding.to(x)

    def vectors(self, length: int) -> Float[Tensor, "L d_model"]:
        """Return the vectors that are added at the first ``length`` positions."""
        config = self.config
        return sinusoidal_encoding(
            length, config.d_model, config.position_layout, config.position_timescale, config.position_offset
        )

    def extra_repr(self) -> str:
        """Return the settings that ``print(model)`` shows for this module."""
        config = self.config
        conventions = config.position_layout, config.position_timescale
        return f"{config.d_model}, {', '.join(map(repr, conventions))}, offset={config.position_offset}"


class LearnedPosition(nn.Embedding):
    """Learned positional embedding, which is added to each vector (Table 3, row E).

    Args:
        config: Model configuration, which defines the number of positions and the index of the first position.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__(config.max_length, config.d_model, dtype=to_dtype(dtype))
        self.offset = config.position_offset

    def reset_parameters(self) -> None:
        """Initialize the vectors from a normal distribution with standard deviation 1 / sqrt(d_model)."""
        _draw_table(self.weight)

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` plus the learned vector of each position.

        Args:
            x: One vector per position.
        """
        return x + self.vectors(x.shape[1])

    def vectors(self, length: int) -> Float[Tensor, "L d_model"]:
        """Return the vectors that are added at the first ``length`` positions."""
        if length > len(self.weight) - self.offset:
            check_positions("length", length, len(self.weight) - self.offset)
        return self.weight[self.offset : self.offset + length]

    def extra_repr(self) -> str:
        """Return the settings that ``print(model)`` shows for this module."""
        return f"{super().extra_repr()}, offset={self.offset}"


class NoPosition(nn.Module):
    """Layer that returns its input, for models with relative position biases instead of positional encodings (T5).

    Args:
        config: Model configuration, which defines the size of the vectors.
        dtype: Not used, because the layer has no parameters.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__()
        self.d_model = config.d_model

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x``."""
        return x

    def vectors(self, length: int) -> Float[Tensor, "L d_model"]:
        """Return zeros in the shape of the vectors that other layers add at the first ``length`` positions."""
        return torch.zeros(length, self.d_model)


POSITIONS = {"sinusoidal": SinusoidalPosition, "learned": LearnedPosition, "relative": NoPosition}


def OutputProjection(  # noqa: N802  the name of a layer
    config: TransformerConfig, embedding: TokenEmbedding, dtype: torch.dtype | str = "float32"
) -> nn.Module:
    """Return a layer that maps each decoder state to one logit per token of the target vocabulary (section 3.4).

    If ``config.ties_output`` is True, the layer is a ``TiedProjection``, which uses the transposed embedding matrix.
    Otherwise, it is an ``nn.Linear``.

    Args:
        config: Model configuration.
        embedding: Target embedding. If the projection is tied, it uses the matrix of this embedding.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.
    """
    if config.ties_output:
        return TiedProjection(embedding, config.output_bias)
    return Linear(config.d_model, config.target_vocab_size, bias=config.output_bias, dtype=dtype)


class TiedProjection(nn.Module):
    """Multiplication by a transposed embedding matrix, plus an optional bias.

    The matrix is registered as a parameter of the embedding only, so the projection and the embedding stay tied if the
    matrix's values, dtype, or device change. This class is not a subclass of ``nn.Linear`` because a tool that replaces
    or merges linear layers would change the embedding too.

    Args:
        embedding: Embedding whose matrix the layer uses.
        bias: Whether to add a bias.
    """

    def __init__(self, embedding: TokenEmbedding, bias: bool) -> None:
        super().__init__()
        self.embedding: TokenEmbedding
        vars(self)["embedding"] = embedding  # bypass registration, which would list the matrix twice
        weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(len(weight), dtype=weight.dtype)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The embedding matrix. To use a different matrix, replace this layer with an ``nn.Linear``."""
        return self.embedding.weight

    def reset_parameters(self) -> None:
        """Set the bias to zero."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L V"]:
        """Return the logits of each position.

        Args:
            x: One decoder state per target position.
        """
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the settings that ``print(model)`` shows for this module."""
        out_features, in_features = self.weight.shape
        return f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}, tied"


def _draw_table(weight: Tensor) -> None:
    if not weight.is_meta:  # on the meta device, ``normal_`` would import SymPy without initializing any values
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
