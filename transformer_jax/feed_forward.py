"""Position-wise feed-forward network (Vaswani et al., 2017, section 3.3).

Axes: B batch, L length.
"""

from __future__ import annotations

from flax import nnx
from jax import Array

from transformer_jax.layers import ACTIVATIONS, Dropout, Linear
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float
from transformer_spec.taps import Tap, no_tap


class PositionwiseFeedForward(nnx.Module):
    """Position-wise feed-forward network: the same two layers are applied to each position separately.

    Equation (2): ``FFN(x) = max(0, x W_1 + b_1) W_2 + b_2``.

    Args:
        config: Model configuration, which defines the inner size, the activation, and the dropout rate.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        rngs: Flax random state for the initial values and dropout.

    Taps:
        inner: Output of the activation, before dropout.
        output: Output of the network.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        bias = config.feed_forward_bias
        self.inner_proj = Linear(config.d_model, config.d_ff, bias=bias, dtype=dtype, rngs=rngs)
        self.output_proj = Linear(config.d_ff, config.d_model, bias=bias, dtype=dtype, rngs=rngs)
        self.activation = config.activation
        self.dropout = Dropout(config.dropout.feed_forward, rngs=rngs)

    def __call__(self, x: Float[Array, "B L d_model"], tap: Tap = no_tap) -> Float[Array, "B L d_model"]:
        """Return the output of the network for each position.

        Args:
            x: One vector per position.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
        """
        inner = tap("inner", ACTIVATIONS[self.activation](self.inner_proj(x)))  # [B, L, d_ff]
        return tap("output", self.output_proj(self.dropout(inner)))


class GatedFeedForward(PositionwiseFeedForward):
    """Feed-forward network with a gate: ``FFN(x) = (activation(x W_gate) * (x W_inner)) W_output`` (Shazeer, 2020).

    Args:
        config: Model configuration, which defines the inner size, the activation, and the dropout rate.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        rngs: Flax random state for the initial values and dropout.

    Taps:
        gate: Output of the activation.
        inner: Gate times the output of ``inner_proj``, before dropout.
        output: Output of the network.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype, rngs=rngs)
        bias = config.feed_forward_bias
        self.gate_proj = Linear(config.d_model, config.d_ff, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B L d_model"], tap: Tap = no_tap) -> Float[Array, "B L d_model"]:
        """Return the output of the network for each position. The arguments are the same as in the base class."""
        gate = tap("gate", ACTIVATIONS[self.activation](self.gate_proj(x)))  # [B, L, d_ff]
        kept = self.dropout(tap("inner", gate * self.inner_proj(x)))  # [B, L, d_ff]
        return tap("output", self.output_proj(kept))


def make_feed_forward(config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> PositionwiseFeedForward:
    """Return a ``GatedFeedForward`` if ``config.gated_feed_forward``, and a ``PositionwiseFeedForward`` otherwise."""
    return (GatedFeedForward if config.gated_feed_forward else PositionwiseFeedForward)(config, dtype, rngs=rngs)
