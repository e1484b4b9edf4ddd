"""The common layers: linear, layer normalization and dropout."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from reference_numpy.functional import (
    ACTIVATIONS,
    draw_keep,
    dropout,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    masked_softmax,
)
from reference_numpy.runtime import check_rng
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float
from transformer_spec.taps import Tap, no_tap

__all__ = ["ACTIVATIONS", "Dropout", "LayerNorm", "Linear", "masked_softmax"]


class Linear:
    """Multiply by a matrix and add a bias: ``x W + b``."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool, dtype: str = "float32") -> None:
        self.kernel = np.zeros((d_in, d_out), dtype)  # zero until weights are loaded
        self.bias = np.zeros(d_out, dtype) if bias else None

    def __call__(self, x: Float[ndarray, "*axes d_in"]) -> Float[ndarray, "*axes d_out"]:
        """Map the last axis of ``x``."""
        return linear(x, self.kernel, self.bias)

    def backward(
        self, x: Float[ndarray, "*axes d_in"], dy: Float[ndarray, "*axes d_out"], tap: Tap
    ) -> Float[ndarray, "*axes d_in"]:
        """Return the gradient with respect to ``x``. The tap receives those with respect to the parameters."""
        dx, dkernel, dbias = linear_backward(x, self.kernel, dy)
        tap("kernel", dkernel)
        if self.bias is not None:
            tap("bias", dbias)
        return dx


class LayerNorm:
    """Normalise the last axis, then scale and shift it (Ba et al., 2016).

    Kind ``standard`` divides by sqrt(biased variance + epsilon), kind ``annotated`` by (unbiased standard
    deviation + epsilon), as the Annotated Transformer does.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.epsilon = config.layer_norm_epsilon
        self.kind = config.layer_norm_kind
        self.scale = np.ones(config.d_model, dtype)
        self.bias = np.zeros(config.d_model, dtype)

    def __call__(self, x: Float[ndarray, "*axes d_model"]) -> Float[ndarray, "*axes d_model"]:
        """Normalise each position of ``x``."""
        return layer_norm(x, self.scale, self.bias, self.epsilon, self.kind)

    def backward(
        self, x: Float[ndarray, "*axes d_model"], dy: Float[ndarray, "*axes d_model"], tap: Tap
    ) -> Float[ndarray, "*axes d_model"]:
        """Return the gradient with respect to ``x``. The tap receives those with respect to the parameters."""
        dx, dscale, dbias = layer_norm_backward(x, self.scale, self.epsilon, dy, self.kind)
        tap("scale", dscale)
        tap("bias", dbias)
        return dx


class Dropout:
    """Set elements to zero at random and scale the rest, in training only (section 5.4).

    Taps:
        ``{name}_keep`` True where an element stays; in training only.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(
        self,
        x: Float[ndarray, "*axes"],
        rng: np.random.Generator | None = None,
        tap: Tap = no_tap,
        name: str = "output",
    ) -> Float[ndarray, "*axes"]:
        """Return ``x``, or in training a thinned-out copy of it; ``name`` is that of the tap that showed ``x``."""
        check_rng(rng)
        if rng is None or self.rate == 0.0:
            return x
        return dropout(x, tap(f"{name}_keep", draw_keep(x.shape, self.rate, rng)), self.rate)
