"""Position-wise feed-forward network (Vaswani et al., 2017, section 3.3).

Axes: B batch, L length.
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
    """Position-wise feed-forward network: the same two layers are applied to each position separately.

    Equation (2): ``FFN(x) = max(0, x W_1 + b_1) W_2 + b_2``.

    Args:
        config: Model configuration, which defines the inner size, the activation, and the dropout rate.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.

    Taps:
        inner: Output of the activation, before dropout.
        output: Output of the network.
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
        """Return the output of the network for each position.

        Args:
            x: One vector per position.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            rng: Random generator for dropout. If None, dropout is disabled (inference).
        """
        inner = tap("inner", ACTIVATIONS[self.activation](self.inner_proj(x)))  # [B, L, d_ff]
        return tap("output", self.output_proj(self.dropout(inner, rng, tap, "inner")))

    def activation_backward(
        self, x: Float[ndarray, "B L d_model"], inner: Float[ndarray, "B L d_ff"], dinner: Float[ndarray, "B L d_ff"]
    ) -> Float[ndarray, "B L d_ff"]:
        """Return the gradient with respect to the input of the activation.

        Args:
            x: Input of ``inner_proj``.
            inner: Output of the activation.
            dinner: Gradient with respect to ``inner``.
        """
        return ACTIVATIONS_BACKWARD[ACTIVATIONS[self.activation]](self.inner_proj(x), dinner)


class GatedFeedForward(PositionwiseFeedForward):
    """Feed-forward network with a gate: ``FFN(x) = (activation(x W_gate) * (x W_inner)) W_output`` (Shazeer, 2020).

    Args:
        config: Model configuration, which defines the inner size, the activation, and the dropout rate.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.

    Taps:
        gate: Output of the activation.
        inner: Gate times the output of ``inner_proj``, before dropout.
        output: Output of the network.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        super().__init__(config, dtype)
        self.gate_proj = Linear(config.d_model, config.d_ff, bias=config.feed_forward_bias, dtype=dtype)

    def __call__(
        self, x: Float[ndarray, "B L d_model"], tap: Tap = no_tap, rng: np.random.Generator | None = None
    ) -> Float[ndarray, "B L d_model"]:
        """Return the output of the network for each position. The arguments are the same as in the base class."""
        gate = tap("gate", ACTIVATIONS[self.activation](self.gate_proj(x)))  # [B, L, d_ff]
        kept = self.dropout(tap("inner", gate * self.inner_proj(x)), rng, tap, "inner")  # [B, L, d_ff]
        return tap("output", self.output_proj(kept))

    def gate_backward(
        self, x: Float[ndarray, "B L d_model"], dgate: Float[ndarray, "B L d_ff"]
    ) -> Float[ndarray, "B L d_ff"]:
        """Return the gradient with respect to the input of the activation.

        Args:
            x: Input of ``gate_proj``.
            dgate: Gradient with respect to the output of the activation.
        """
        return ACTIVATIONS_BACKWARD[ACTIVATIONS[self.activation]](self.gate_proj(x), dgate)


def make_feed_forward(config: TransformerConfig, dtype: str = "float32") -> PositionwiseFeedForward:
    """Return a ``GatedFeedForward`` if ``config.gated_feed_forward``, and a ``PositionwiseFeedForward`` otherwise."""
    return (GatedFeedForward if config.gated_feed_forward else PositionwiseFeedForward)(config, dtype)
