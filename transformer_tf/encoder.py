"""The encoder (Vaswani et al., 2017, section 3.1, left half of Figure 1).

B batch, S source length.
"""

from __future__ import annotations

from typing import Any

import keras
from tensorflow import Tensor

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float
from transformer_spec.taps import Tap, no_tap, within
from transformer_tf.attention import MultiHeadAttention
from transformer_tf.block import Block, attention_mask_for
from transformer_tf.feed_forward import PositionwiseFeedForward
from transformer_tf.layers import Dropout, LayerNorm


class EncoderLayer(Block):
    """Let every source position gather from the others, then transform each on its own.

    Section 3.1: each sub-layer is ``LayerNorm(x + Sublayer(x))``; norm order ``pre`` is
    ``x + Sublayer(LayerNorm(x))`` instead.

    Taps:
        Those of both sub-layers; ``self_attention_norm.output``, ``feed_forward_norm.output``; ``output``.
    """

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.norm_order = config.norm_order
        with keras.name_scope(self.name):
            self.self_attention = MultiHeadAttention(config, dtype=dtype, name="self_attention")
            self.self_attention_norm = LayerNorm(config, dtype=dtype, name="self_attention_norm")
            self.feed_forward = PositionwiseFeedForward(config, dtype=dtype, name="feed_forward")
            self.feed_forward_norm = LayerNorm(config, dtype=dtype, name="feed_forward_norm")
        self.dropout = Dropout(config.dropout.residual, dtype=dtype, name="dropout")

    def call(
        self,
        x: Float[Tensor, "B S d_model"],
        attention_mask: Bool[Tensor, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
        mask: Bool[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B S d_model"]:
        """Return the layer's output for each source position.

        Args:
            x: One vector per source position.
            attention_mask: True if a position may attend to another. None allows every pair.
            tap: Receives each named intermediate and returns the value to go on with.
            mask: True for tokens, False for padding. Keras passes the mask of ``x``.
        """
        mask = attention_mask_for(x, attention_mask, mask)
        if self.norm_order == "post":
            attended = self.self_attention(x, x, mask, tap=within(tap, "self_attention"))
            x = tap("self_attention_norm.output", self.self_attention_norm(x + self.dropout(attended)))
            transformed = self.feed_forward(x, tap=within(tap, "feed_forward"))
            x = tap("feed_forward_norm.output", self.feed_forward_norm(x + self.dropout(transformed)))
        else:
            normed = tap("self_attention_norm.output", self.self_attention_norm(x))
            x = x + self.dropout(self.self_attention(normed, normed, mask, tap=within(tap, "self_attention")))
            normed = tap("feed_forward_norm.output", self.feed_forward_norm(x))
            x = x + self.dropout(self.feed_forward(normed, tap=within(tap, "feed_forward")))
        return tap("output", x)


class EncoderStack(Block):
    """Turn the embedded source into the memory that the decoder reads: a stack of encoder layers.

    Taps:
        Those of each layer under ``layers.{i}``; ``output``.
    """

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        with keras.name_scope(self.name):
            self.layers = [EncoderLayer(config, dtype, name=f"layer_{i}") for i in range(config.num_encoder_layers)]
            self.final_norm = LayerNorm(config, dtype, name="final_norm") if config.final_norm else None
        self.activation_checkpointing = False  # a Trainer switches it on for a step that is to save memory

    def call(
        self,
        x: Float[Tensor, "B S d_model"],
        attention_mask: Bool[Tensor, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
        training: bool | None = None,
        mask: Bool[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B S d_model"]:
        """Return the memory. Both masks are the same as those of an ``EncoderLayer``."""
        mask = attention_mask_for(x, attention_mask, mask)
        for i, layer in enumerate(self.layers):
            if self.activation_checkpointing and tap is no_tap:
                x = layer.recomputed(x, attention_mask=mask, training=training)
            else:
                x = layer(x, mask, tap=within(tap, f"layers.{i}"))
        if self.final_norm is not None:
            x = self.final_norm(x)
        return tap("output", x)
