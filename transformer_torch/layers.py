"""The layers that every framework ships, with this project's names, defaults and initial values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from reference_numpy.config import TransformerConfig
from reference_numpy.shapes import Bool, Float

__all__ = ["ACTIVATIONS", "Dropout", "LayerNorm", "Linear", "masked_softmax"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swish": F.silu,
}

Dropout = nn.Dropout


def masked_softmax(
    scores: Float[Tensor, "*axes M"], mask: Bool[Tensor, "*#axes #M"] | None = None
) -> Float[Tensor, "*axes M"]:
    """Turn scores into weights that sum to one over the allowed keys, and to zero where none is allowed."""
    dtype = torch.promote_types(scores.dtype, torch.float32)  # bfloat16 is too coarse to sum in
    if mask is None:
        return scores.softmax(-1, dtype).to(scores.dtype)
    # The lowest finite score, not -inf: a row of -inf would be NaN, forward and backward.
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1, dtype)
    return weights.masked_fill(~mask, 0.0).to(scores.dtype)


class Linear(nn.Linear):
    """Multiply by a matrix and add a bias: ``x W + b``."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool, dtype: str = "float32") -> None:
        super().__init__(d_in, d_out, bias=bias, dtype=getattr(torch, dtype))

    def reset_parameters(self) -> None:
        """Draw a Xavier uniform matrix; torch's own default is narrower and gives the bias random values."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LayerNorm(nn.LayerNorm):
    """Normalise the last axis, then scale and shift it (Ba et al., 2016).

    Kind ``standard`` divides by sqrt(biased variance + epsilon), kind ``annotated`` by (unbiased standard
    deviation + epsilon), as the Annotated Transformer does.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        super().__init__(config.d_model, eps=config.layer_norm_epsilon, dtype=getattr(torch, dtype))
        self.kind = config.layer_norm_kind

    def forward(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Normalise each position of ``x``."""
        if self.kind == "standard":
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(-1, keepdim=True)
        normed = centred / (wide.std(-1, correction=1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight + self.bias
