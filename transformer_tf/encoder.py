"""The encoder (Vaswani et al., 2017, section 3.1, left half of Figure 1).

Axes: B batch, S source length.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float
from transformer_spec.taps import Tap, no_tap, within
from transformer_tf.attention import MultiHeadAttention
from transformer_tf.block import Block, attention_mask_for
from transformer_tf.feed_forward import make_feed_forward
from transformer_tf.layers import Dropout, make_norm
from transformer_tf.relative_position import RelativePositionBias


class EncoderLayer(Block):
    """Encoder layer: self-attention followed by a feed-forward network (section 3.1).

    The output of each sublayer is ``LayerNorm(x + Sublayer(x))`` if ``config.norm_order`` is ``post``, as in the paper,
    and ``x + Sublayer(LayerNorm(x))`` if it is ``pre``.

    Args:
        config: Model configuration.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.

    Taps:
        self_attention, feed_forward: Prefixes of the sublayers' taps.
        self_attention_norm.output, feed_forward_norm.output: Outputs of the layer norms.
        output: Output of the layer.
    """

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.norm_order = config.norm_order
        with keras.name_scope(self.name):
            self.self_attention = MultiHeadAttention(config, dtype=dtype, name="self_attention")
            self.self_attention_norm = make_norm(config, dtype=dtype, name="self_attention_norm")
            self.feed_forward = make_feed_forward(config, dtype=dtype, name="feed_forward")
            self.feed_forward_norm = make_norm(config, dtype=dtype, name="feed_forward_norm")
        self.dropout = Dropout(config.dropout.residual, dtype=dtype, name="dropout")

    def call(
        self,
        x: Float[Tensor, "B S d_model"],
        attention_mask: Bool[Tensor, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
        mask: Bool[Tensor, "B S"] | None = None,
        bias: Float[Tensor, "1 H S S"] | None = None,
    ) -> Float[Tensor, "B S d_model"]:
        """Return the output of the layer for each source position.

        Args:
            x: One vector per source position.
            attention_mask: True if a query position may attend to a key position. If None, no mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            mask: True for tokens, False for padding. By default, Keras passes the mask that is attached to ``x``.
            bias: Relative position bias of self-attention. If None, no bias is added.
        """
        mask = attention_mask_for(x, attention_mask, mask)
        if self.norm_order == "post":
            attended = self.self_attention(x, x, mask, tap=within(tap, "self_attention"), bias=bias)
            x = tap("self_attention_norm.output", self.self_attention_norm(x + self.dropout(attended)))
            transformed = self.feed_forward(x, tap=within(tap, "feed_forward"))
            x = tap("feed_forward_norm.output", self.feed_forward_norm(x + self.dropout(transformed)))
        else:
            normed = tap("self_attention_norm.output", self.self_attention_norm(x))
            attended = self.self_attention(normed, normed, mask, tap=within(tap, "self_attention"), bias=bias)
            x = x + self.dropout(attended)
            normed = tap("feed_forward_norm.output", self.feed_forward_norm(x))
            x = x + self.dropout(self.feed_forward(normed, tap=within(tap, "feed_forward")))
        return tap("output", x)


class EncoderStack(Block):
    """Encoder stack: a sequence of encoder layers that maps the embedded source to the encoder memory.

    Args:
        config: Model configuration, which defines the number of layers and whether the stack ends with a layer norm.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.

    Taps:
        relative_bias.output: Relative position bias, if ``config.position_encoding`` is ``relative``.
        layers.{i}: Prefix of the taps of layer i.
        output: Output of the stack, before dropout.
    """

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.relative_bias = None
        with keras.name_scope(self.name):
            if config.position_encoding == "relative":
                self.relative_bias = RelativePositionBias(config, dtype, bidirectional=True, name="relative_bias")
            self.layers = [EncoderLayer(config, dtype, name=f"layer_{i}") for i in range(config.num_encoder_layers)]
            self.final_norm = make_norm(config, dtype, name="final_norm") if config.final_norm else None
        self.dropout = Dropout(config.dropout.final, dtype=dtype, name="dropout")
        self.activation_checkpointing = False  # a Trainer can set this to True during a step, to save memory

    def call(
        self,
        x: Float[Tensor, "B S d_model"],
        attention_mask: Bool[Tensor, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
        training: bool | None = None,
        mask: Bool[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B S d_model"]:
        """Return the encoder memory: one vector per source position.

        Args:
            x: One embedding per source position.
            attention_mask: True if a query position may attend to a key position. If None, no mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            training: If True, dropout is enabled. If None, the mode of the enclosing Keras layer is used.
            mask: True for tokens, False for padding. By default, Keras passes the mask that is attached to ``x``.
        """
        mask = attention_mask_for(x, attention_mask, mask)
        bias = None
        if self.relative_bias is not None:
            positions = tf.range(tf.shape(x)[1])
            bias = tap("relative_bias.output", self.relative_bias(positions - positions[:, None]))  # [1, H, S, S]
        for i, layer in enumerate(self.layers):
            if self.activation_checkpointing and tap is no_tap:
                x = layer.recomputed(x, bias=bias, attention_mask=mask, training=training)
            else:
                x = layer(x, mask, tap=within(tap, f"layers.{i}"), bias=bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.dropout(tap("output", x))
