"""The encoder (Vaswani et al., 2017, section 3.1, left half of Figure 1).

Axes: B batch, S source length.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from transformer_jax.attention import MultiHeadAttention
from transformer_jax.feed_forward import make_feed_forward
from transformer_jax.layers import Dropout, make_norm
from transformer_jax.relative_position import RelativePositionBias
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float
from transformer_spec.taps import Tap, no_tap, within


class EncoderLayer(nnx.Module):
    """Encoder layer: self-attention followed by a feed-forward network (section 3.1).

    The output of each sublayer is ``LayerNorm(x + Sublayer(x))`` if ``config.norm_order`` is ``post``, as in the paper,
    and ``x + Sublayer(LayerNorm(x))`` if it is ``pre``.

    Args:
        config: Model configuration.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        rngs: Flax random state for the initial values and dropout.

    Taps:
        self_attention, feed_forward: Prefixes of the sublayers' taps.
        self_attention_norm.output, feed_forward_norm.output: Outputs of the layer norms.
        output: Output of the layer.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        self.norm_order = config.norm_order
        self.self_attention = MultiHeadAttention(config, dtype, rngs=rngs)
        self.self_attention_norm = make_norm(config, dtype, rngs=rngs)
        self.feed_forward = make_feed_forward(config, dtype, rngs=rngs)
        self.feed_forward_norm = make_norm(config, dtype, rngs=rngs)
        self.dropout = Dropout(config.dropout.residual, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B S d_model"],
        mask: Bool[Array, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
        bias: Float[Array, "1 H S S"] | None = None,
    ) -> Float[Array, "B S d_model"]:
        """Return the output of the layer for each source position.

        Args:
            x: One vector per source position.
            mask: True if a query position may attend to a key position. If None, no mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            bias: Relative position bias of self-attention. If None, no bias is added.
        """
        if self.norm_order == "post":
            attended = self.self_attention(x, x, mask, within(tap, "self_attention"), bias=bias)
            x = tap("self_attention_norm.output", self.self_attention_norm(x + self.dropout(attended)))
            transformed = self.feed_forward(x, within(tap, "feed_forward"))
            x = tap("feed_forward_norm.output", self.feed_forward_norm(x + self.dropout(transformed)))
        else:
            normed = tap("self_attention_norm.output", self.self_attention_norm(x))
            attended = self.self_attention(normed, normed, mask, within(tap, "self_attention"), bias=bias)
            x = x + self.dropout(attended)
            normed = tap("feed_forward_norm.output", self.feed_forward_norm(x))
            x = x + self.dropout(self.feed_forward(normed, within(tap, "feed_forward")))
        return tap("output", x)


class EncoderStack(nnx.Module):
    """Encoder stack: a sequence of encoder layers that maps the embedded source to the encoder memory.

    Args:
        config: Model configuration, which defines the number of layers and whether the stack ends with a layer norm.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        rngs: Flax random state for the initial values and dropout.

    Taps:
        relative_bias.output: Relative position bias, if ``config.position_encoding`` is ``relative``.
        layers.{i}: Prefix of the taps of layer i.
        output: Output of the stack, before dropout.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        is_relative = config.position_encoding == "relative"
        self.relative_bias = RelativePositionBias(config, dtype, bidirectional=True, rngs=rngs) if is_relative else None
        self.layers = nnx.List(EncoderLayer(config, dtype, rngs=rngs) for _ in range(config.num_encoder_layers))
        self.final_norm = make_norm(config, dtype, rngs=rngs) if config.final_norm else None
        self.dropout = Dropout(config.dropout.final, rngs=rngs)
        self.activation_checkpointing = False  # a Trainer can set this to True during a step, to save memory

    def __call__(
        self,
        x: Float[Array, "B S d_model"],
        mask: Bool[Array, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
    ) -> Float[Array, "B S d_model"]:
        """Return the encoder memory: one vector per source position.

        Args:
            x: One embedding per source position.
            mask: True if a query position may attend to a key position. If None, no mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
        """
        bias = None
        if self.relative_bias is not None:
            positions = jnp.arange(x.shape[1])
            bias = tap("relative_bias.output", self.relative_bias(positions - positions[:, None]))  # [1, H, S, S]
        for i, layer in enumerate(self.layers):
            if self.activation_checkpointing and tap is no_tap:
                x = nnx.remat(lambda layer, x, mask, bias: layer(x, mask, bias=bias))(layer, x, mask, bias)
            else:
                x = layer(x, mask, within(tap, f"layers.{i}"), bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.dropout(tap("output", x))
