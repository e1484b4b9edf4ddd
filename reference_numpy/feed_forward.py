"""Position-wise feed-forward network (Vaswani et al., 2017, section 3.3).

B batch, L length.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from reference_numpy.functional import ACTIVATIONS_BACKWARD
from reference_numpy.layers import ACTIVATIONS, Dropout, Linear
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float
from transformer_spec.taps import Tap, no_tap


class PositionwiseFeedForward:
    """Transform each position by the same two-layer network, seeing no other position.

    Equation (2): ``FFN(x) = max(0, x W_1 + b_1) W_2 + b_2``.

    Taps:
        ``inner`` after the activation; ``output``.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        bias = config.feed_forward_bias
        self.inner_proj = Linear(config.d_model, config.d_ff, bias=bias, dtype=dtype)
        self.output_proj = Linear(config.d_ff, config.d_model, bias=bias, dtype=dtype)
        self.activation = config.activation
        self.dropout = Dropout(config.dropout.feed_forward)

    def __call__(
        self, x: Float[ndarray, "B L d_model"], tap: Tap = no_tap, rng: np.random.Generator | None = None
    ) -> Float[ndarray, "B L d_model"]:
        """Transform each position of ``x``."""
        inner = tap("inner", ACTIVATIONS[self.activation](self.inner_proj(x)))  # [B, L, d_ff]
        return tap("output", self.output_proj(self.dropout(inner, rng, tap, "inner")))

    def activation_backward(
        self, x: Float[ndarray, "B L d_model"], inner: Float[ndarray, "B L d_ff"], dinner: Float[ndarray, "B L d_ff"]
    ) -> Float[ndarray, "B L d_ff"]:
        """Return the gradient with respect to the input of the activation.

        Args:
            x: The input of ``inner_proj``.
            inner: The output of the activation.
            dinner: The gradient with respect to ``inner``.
        """
        return ACTIVATIONS_BACKWARD[ACTIVATIONS[self.activation]](self.inner_proj(x), dinner)
