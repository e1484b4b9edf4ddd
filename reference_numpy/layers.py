"""Basic layers: linear, layer normalization, and dropout."""

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
    rms_norm,
    rms_norm_backward,
)
from reference_numpy.runtime import check_rng
from transformer_spec.checks import check_number
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float
from transformer_spec.taps import Tap, no_tap

__all__ = ["ACTIVATIONS", "Dropout", "LayerNorm", "Linear", "RMSNorm", "make_norm", "masked_softmax"]


class Linear:
    """Linear layer: ``x W + b``.

    Args:
        d_in: Size of the last axis of the input.
        d_out: Size of the last axis of the output.
        bias: Whether to add a bias.
        dtype: Dtype of the parameters, ``float32`` or ``float64``. The parameters are zero until you set weights.
    """

    def __init__(self, d_in: int, d_out: int, *, bias: bool, dtype: str = "float32") -> None:
        self.kernel = np.zeros((d_in, d_out), dtype)  # zero until you set weights
        self.bias = np.zeros(d_out, dtype) if bias else None

    def __call__(self, x: Float[ndarray, "*axes d_in"]) -> Float[ndarray, "*axes d_out"]:
        """Return ``x W + b``, applied to the last axis of ``x``."""
        return linear(x, self.kernel, self.bias)

    def backward(
        self, x: Float[ndarray, "*axes d_in"], dy: Float[ndarray, "*axes d_out"], tap: Tap
    ) -> Float[ndarray, "*axes d_in"]:
        """Return the gradient with respect to ``x``.

        Args:
            x: Input of the forward pass.
            dy: Gradient with respect to the output.
            tap: Callback that receives the gradients with respect to ``kernel`` and ``bias``.
        """
        dx, dkernel, dbias = linear_backward(x, self.kernel, dy)
        tap("kernel", dkernel)
        if self.bias is not None:
            tap("bias", dbias)
        return dx


class LayerNorm:
    """Layer normalization over the last axis, followed by a learned scale and bias (Ba et al., 2016).

    If ``config.layer_norm_kind`` is ``standard``, the divisor is sqrt(biased variance + epsilon). If it is
    ``annotated``, the divisor is (unbiased standard deviation + epsilon), as in the Annotated Transformer.

    Args:
        config: Model configuration, which defines the size, the epsilon, and the formula for the divisor.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.epsilon = config.layer_norm_epsilon
        self.kind = config.layer_norm_kind
        self.scale = np.ones(config.d_model, dtype)
        self.bias = np.zeros(config.d_model, dtype)

    def __call__(self, x: Float[ndarray, "*axes d_model"]) -> Float[ndarray, "*axes d_model"]:
        """Normalize each position of ``x``."""
        return layer_norm(x, self.scale, self.bias, self.epsilon, self.kind)

    def backward(
        self, x: Float[ndarray, "*axes d_model"], dy: Float[ndarray, "*axes d_model"], tap: Tap
    ) -> Float[ndarray, "*axes d_model"]:
        """Return the gradient with respect to ``x``.

        Args:
            x: Input of the forward pass.
            dy: Gradient with respect to the output.
            tap: Callback that receives the gradients with respect to ``scale`` and ``bias``.
        """
        dx, dscale, dbias = layer_norm_backward(x, self.scale, self.epsilon, dy, self.kind)
        tap("scale", dscale)
        tap("bias", dbias)
        return dx


class RMSNorm:
    """Root mean square normalization over the last axis, followed by a learned scale (Zhang and Sennrich, 2019).

    Args:
        config: Model configuration, which defines the size and the epsilon.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.epsilon = config.layer_norm_epsilon
        self.scale = np.ones(config.d_model, dtype)

    def __call__(self, x: Float[ndarray, "*axes d_model"]) -> Float[ndarray, "*axes d_model"]:
        """Normalize each position of ``x``."""
        return rms_norm(x, self.scale, self.epsilon)

    def backward(
        self, x: Float[ndarray, "*axes d_model"], dy: Float[ndarray, "*axes d_model"], tap: Tap
    ) -> Float[ndarray, "*axes d_model"]:
        """Return the gradient with respect to ``x``.

        Args:
            x: Input of the forward pass.
            dy: Gradient with respect to the output.
            tap: Callback that receives the gradient with respect to ``scale``.
        """
        dx, dscale = rms_norm_backward(x, self.scale, self.epsilon, dy)
        tap("scale", dscale)
        return dx


def make_norm(config: TransformerConfig, dtype: str = "float32") -> LayerNorm | RMSNorm:
    """Return an ``RMSNorm`` if ``config.layer_norm_kind`` is ``rms``, and a ``LayerNorm`` otherwise."""
    return RMSNorm(config, dtype) if config.layer_norm_kind == "rms" else LayerNorm(config, dtype)


class Dropout:
    """Dropout: sets random elements to zero and scales the rest by 1 / (1 - rate), in training only (section 5.4).

    Args:
        rate: Probability of dropping an element, in [0, 1).

    Raises:
        TypeError: If the rate is not a number.
        ValueError: If the rate is not in [0, 1).

    Taps:
        {name}_keep: True for elements that are kept. This tap fires only in training.
    """

    def __init__(self, rate: float) -> None:
        self.rate = check_number("rate", rate, "in [0, 1)", lambda x: 0 <= x < 1)

    def __call__(
        self,
        x: Float[ndarray, "*axes"],
        rng: np.random.Generator | None = None,
        tap: Tap = no_tap,
        name: str = "output",
    ) -> Float[ndarray, "*axes"]:
        """Return ``x`` unchanged in inference, or with dropout applied in training.

        Args:
            x: Array of any shape.
            rng: Random generator. If None, dropout is disabled (inference).
            tap: Callback that receives the mask of the kept elements. Its return value replaces the mask.
            name: Name of the tap that received ``x``. The tap of the mask is called ``{name}_keep``.
        """
        check_rng(rng)
        if rng is None or self.rate == 0.0:
            return x
        return dropout(x, tap(f"{name}_keep", draw_keep(x.shape, self.rate, rng)), self.rate)
