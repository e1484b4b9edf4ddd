"""PyTorch's own layers, with the names, defaults and initial values of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float
from transformer_torch.runtime import to_dtype

__all__ = ["ACTIVATIONS", "Dropout", "LayerNorm", "Linear", "OwnDropout", "masked_softmax"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swish": F.silu,
}

Dropout = nn.Dropout


class OwnDropout(nn.Dropout):
    """Draw masks for all rows, heads and units, as one device would, and keep those that this device computes.

    Attributes:
        first: The first of its own rows.
        rows: How many rows are drawn; own rows behind them are padding, which is left as it is.

    Args:
        rate: The share of the values that are dropped.
        axis: The axis that is divided into parts; None: there is none.
        parts: How many parts there are.
        part: Which of them is this device's.
    """

    def __init__(self, rate: float, axis: int | None, parts: int, part: int) -> None:
        super().__init__(rate)
        self.axis, self.parts, self.part = axis, parts if axis is not None else 1, part
        self.first = self.rows = 0

    def forward(self, x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """Drop values of ``x`` in training."""
        if not self.training or self.p == 0.0:
            return x
        shape = [self.rows, *x.shape[1:]]
        if self.axis is not None:
            shape[self.axis] *= self.parts
        mask = F.dropout(x.new_ones(shape), self.p)[self.first : self.first + len(x)]
        if self.axis is not None:
            mask = mask.chunk(self.parts, self.axis)[self.part]
        padding = x.new_ones(len(x) - len(mask), *x.shape[1:])
        return x * torch.cat([mask, padding])


@contextmanager
def inference(model: nn.Module) -> Iterator[Any]:
    """Switch dropout off in a model, and leave each part of it in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield model
    finally:
        for module, mode in modes:
            module.training = mode


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


def Linear(  # noqa: N802  the name of a layer
    d_in: int, d_out: int, *, bias: bool, dtype: torch.dtype | str = "float32", device: torch.device | str | None = None
) -> nn.Linear:
    """Return PyTorch's own layer, ``x W + b``, with initial values as in the paper's code (see ``initialize``)."""
    return initialize(nn.Linear(d_in, d_out, bias=bias, dtype=to_dtype(dtype), device=device))


def initialize(linear: nn.Linear) -> nn.Linear:
    """Draw a Xavier uniform matrix; PyTorch's default is narrower and draws the bias, which is zero here."""
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


class LayerNorm(nn.LayerNorm):
    """Normalise the last axis, then scale and shift it (Ba et al., 2016).

    Kind ``standard`` divides by sqrt(biased variance + epsilon), kind ``annotated`` by (unbiased standard
    deviation + epsilon), as the Annotated Transformer does.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__(config.d_model, eps=config.layer_norm_epsilon, dtype=to_dtype(dtype))
        self.kind = config.layer_norm_kind

    def forward(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Normalise each position of ``x``."""
        if self.kind == "standard":
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(-1, keepdim=True)
        normed = centred / (wide.std(-1, correction=1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight + self.bias
