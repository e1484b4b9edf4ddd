"""PyTorch's basic layers, with this package's parameter names, defaults, and initial values."""

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

__all__ = ["ACTIVATIONS", "Dropout", "LayerNorm", "Linear", "OwnDropout", "RMSNorm", "make_norm", "masked_softmax"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swish": F.silu,
}

Dropout = nn.Dropout


class OwnDropout(nn.Dropout):
    """A dropout layer for one of several devices.

    It samples the mask for the full batch and all parts of the divided axis, and uses this device's part of the mask.

    All devices sample the same random numbers, so the result doesn't depend on the number of devices.

    Attributes:
        first: Index of this device's first row in the full batch.
        rows: Number of rows in the full batch. Later rows are padding and are not modified.

    Args:
        rate: Probability of dropping an element.
        axis: Axis that is divided over several devices, or None.
        parts: Number of parts into which the axis is divided.
        part: Index of this device's part.
    """

    def __init__(self, rate: float, axis: int | None, parts: int, part: int) -> None:
        super().__init__(rate)
        self.axis, self.parts, self.part = axis, parts if axis is not None else 1, part
        self.first = self.rows = 0

    def forward(self, x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """Return ``x`` unchanged in inference, or with dropout applied in training."""
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
    """Disable dropout within the context, and restore the training mode of every module afterwards."""
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
    """Return the softmax over the allowed keys. If no key is allowed, all weights are zero.

    Args:
        scores: Similarity of each key to the query.
        mask: True if a key is allowed. If None, every key is allowed.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)  # bfloat16 is too imprecise for sums
    if mask is None:
        return scores.softmax(-1, dtype).to(scores.dtype)
    # Use the lowest finite score, because a row of -inf would give NaN in both the forward and the backward pass.
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1, dtype)
    return weights.masked_fill(~mask, 0.0).to(scores.dtype)


def Linear(  # noqa: N802  the name of a layer
    d_in: int,
    d_out: int,
    *,
    bias: bool,
    dtype: torch.dtype | str = "float32",
    device: torch.device | str | None = None,
    gain: float = 1.0,
) -> nn.Linear:
    """Return an ``nn.Linear``, ``x W + b``, with a Xavier-uniform matrix and a zero bias.

    Args:
        d_in: Size of the last axis of the input.
        d_out: Size of the last axis of the output.
        bias: Whether to add a bias.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.
        device: Device of the parameters. If None, PyTorch's default device is used.
        gain: Factor by which the initial values of the matrix are multiplied.
    """
    linear = nn.Linear(d_in, d_out, bias=bias, dtype=to_dtype(dtype), device=device)
    vars(linear)["gain"] = gain  # for a later call of initialize
    return initialize(linear)


def initialize(linear: nn.Linear) -> nn.Linear:
    """Initialize the matrix with Xavier-uniform values and the bias with zeros.

    PyTorch's default ranges are narrower.
    """
    nn.init.xavier_uniform_(linear.weight, vars(linear).get("gain", 1.0))
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


class LayerNorm(nn.LayerNorm):
    """Layer normalization over the last axis, followed by a learned scale and bias (Ba et al., 2016).

    If ``config.layer_norm_kind`` is ``standard``, the divisor is sqrt(biased variance + epsilon). If it is
    ``annotated``, the divisor is (unbiased standard deviation + epsilon), as in the Annotated Transformer.

    Args:
        config: Model configuration, which defines the size, the epsilon, and the formula for the divisor.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__(config.d_model, eps=config.layer_norm_epsilon, dtype=to_dtype(dtype))
        self.kind = config.layer_norm_kind

    def forward(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Normalize each position of ``x``."""
        if self.kind == "standard":
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centered = wide - wide.mean(-1, keepdim=True)
        normed = centered / (wide.std(-1, correction=1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight + self.bias


class RMSNorm(nn.RMSNorm):
    """Root mean square normalization over the last axis, followed by a learned scale (Zhang and Sennrich, 2019).

    Args:
        config: Model configuration, which defines the size and the epsilon.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__(config.d_model, eps=config.layer_norm_epsilon, dtype=to_dtype(dtype))


def make_norm(config: TransformerConfig, dtype: torch.dtype | str = "float32") -> LayerNorm | RMSNorm:
    """Return an ``RMSNorm`` if ``config.layer_norm_kind`` is ``rms``, and a ``LayerNorm`` otherwise."""
    return RMSNorm(config, dtype) if config.layer_norm_kind == "rms" else LayerNorm(config, dtype)
