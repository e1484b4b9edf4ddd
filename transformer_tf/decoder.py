"""The decoder (Vaswani et al., 2017, section 3.1, right half of Figure 1).

Axes: B batch, S source length, T target length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap, within
from transformer_tf.attention import KeyValueCache, KeyValues, MultiHeadAttention, Nested
from transformer_tf.block import Block, attention_mask_for
from transformer_tf.feed_forward import make_feed_forward
from transformer_tf.layers import Dropout, make_norm
from transformer_tf.relative_position import RelativePositionBias


class DecoderLayer(Block):
    """Decoder layer: masked self-attention, cross-attention, and a feed-forward network (section 3.1).

    The output of each sublayer is ``LayerNorm(x + Sublayer(x))`` if ``config.norm_order`` is ``post``, as in the paper,
    and ``x + Sublayer(LayerNorm(x))`` if it is ``pre``.

    Args:
        config: Model configuration.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        with_self_attention: If False, the self-attention and its layer norm are omitted. See
            ``config.skip_first_self_attention``.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.

    Taps:
        self_attention, cross_attention, feed_forward: Prefixes of the sublayers' taps.
        self_attention_norm.output, cross_attention_norm.output, feed_forward_norm.output: Outputs of the layer norms.
        output: Output of the layer.
    """

    def __init__(
        self, config: TransformerConfig, dtype: str | None = None, with_self_attention: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(dtype=dtype, **kwargs)
        config = config.in_decoder
        self.norm_order = config.norm_order
        self.self_attention = self.self_attention_norm = None
        with keras.name_scope(self.name):
            if with_self_attention:
                self.self_attention = MultiHeadAttention(config, dtype=dtype, name="self_attention")
                self.self_attention_norm = make_norm(config, dtype=dtype, name="self_attention_norm")
            self.cross_attention = MultiHeadAttention(config, dtype=dtype, name="cross_attention")
            self.cross_attention_norm = make_norm(config, dtype=dtype, name="cross_attention_norm")
            self.feed_forward = make_feed_forward(config, dtype=dtype, name="feed_forward")
            self.feed_forward_norm = make_norm(config, dtype=dtype, name="feed_forward_norm")
        self.dropout = Dropout(config.dropout.residual, dtype=dtype, name="dropout")

    def call(
        self,
        x: Float[Tensor, "B T d_model"],
        memory: Float[Tensor, "B S d_model"] | KeyValues,
        self_mask: Bool[Tensor, "#B #H #T #M"] | None = None,
        cross_mask: Bool[Tensor, "#N #H #T #S"] | None = None,
        tap: Tap = no_tap,
        past: KeyValueCache | None = None,
        bias: Float[Tensor, "1 H T M"] | None = None,
    ) -> Float[Tensor, "B T d_model"]:
        """Return the output of the layer for each target position.

        Args:
            x: One vector per target position.
            memory: Encoder memory, or its keys and values from ``cross_attention.project``.
            self_mask: Mask for self-attention. True if a query position may attend to a key position. If None, no mask
                is applied.
            cross_mask: Mask for cross-attention. True if a target position may attend to a memory position. If None, no
                mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            past: Cache of the keys and values of earlier target positions, for decoding step by step. None means that
                ``x`` contains all positions.
            bias: Relative position bias of self-attention. If None, no bias is added.
        """
        if self.norm_order == "post":
            if self.self_attention and self.self_attention_norm:
                attended = self.self_attention(x, x, self_mask, tap=within(tap, "self_attention"), past=past, bias=bias)
                x = tap("self_attention_norm.output", self.self_attention_norm(x + self.dropout(attended)))
            attended = self.cross_attention(x, memory, cross_mask, tap=within(tap, "cross_attention"))
            x = tap("cross_attention_norm.output", self.cross_attention_norm(x + self.dropout(attended)))
            transformed = self.feed_forward(x, tap=within(tap, "feed_forward"))
            x = tap("feed_forward_norm.output", self.feed_forward_norm(x + self.dropout(transformed)))
        else:
            if self.self_attention and self.self_attention_norm:
                normed = tap("self_attention_norm.output", self.self_attention_norm(x))
                attended = self.self_attention(
                    normed, normed, self_mask, tap=within(tap, "self_attention"), past=past, bias=bias
                )
                x = x + self.dropout(attended)
            normed = tap("cross_attention_norm.output", self.cross_attention_norm(x))
            x = x + self.dropout(self.cross_attention(normed, memory, cross_mask, tap=within(tap, "cross_attention")))
            normed = tap("feed_forward_norm.output", self.feed_forward_norm(x))
            x = x + self.dropout(self.feed_forward(normed, tap=within(tap, "feed_forward")))
        return tap("output", x)


@dataclass
class DecoderCache(Nested):
    """State of the decoder between two decoding steps, created by ``init_cache``.

    Each of the R rows belongs to one hypothesis of a source sequence. Hypotheses of the same sequence are in adjacent
    rows.

    Attributes:
        memory: Keys and values of the encoder memory, one entry per layer. Hypotheses of the same sequence share these
            keys and values.
        past: Keys and values of the target positions decoded so far, one entry per layer with self-attention.
        cross_mask: True for source positions that contain a token.
        self_mask: True for target positions that contain a token.
        positions: Positional encodings that are added to the embeddings, one per target position.
    """

    memory: list[KeyValues]
    past: list[KeyValueCache]
    cross_mask: Bool[Tensor, "B 1 1 S"]
    self_mask: Bool[Tensor, "R 1 1 capacity"]
    positions: Float[Tensor, "capacity d_model"]

    @property
    def length(self) -> Int[Tensor, ""]:
        """Number of target positions decoded so far."""
        return self.past[0].length

    def reorder(self, rows: Int[Tensor, " R"]) -> None:
        """Replace the hypothesis in row i with the hypothesis in row ``rows[i]``.

        Beam search uses this method to drop some hypotheses and to duplicate others.

        Args:
            rows: For each row of the result, the index of the row to copy, which must contain a hypothesis of the same
                source sequence.
        """
        self.self_mask = tf.gather(self.self_mask, rows)
        for past in self.past:
            past.reorder(rows)


class DecoderStack(Block):
    """Decoder stack: a sequence of decoder layers that maps the embedded target and the memory to decoder states.

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
                sizes = config.in_decoder
                self.relative_bias = RelativePositionBias(sizes, dtype, bidirectional=False, name="relative_bias")
            self.layers = [
                DecoderLayer(config, dtype, config.has_self_attention(i), name=f"layer_{i}")
                for i in range(config.num_decoder_layers)
            ]
            self.final_norm = make_norm(config, dtype, name="final_norm") if config.final_norm else None
        self.dropout = Dropout(config.dropout.final, dtype=dtype, name="dropout")
        self.activation_checkpointing = False  # a Trainer can set this to True during a step, to save memory

    def call(
        self,
        x: Float[Tensor, "B T d_model"],
        memory: Float[Tensor, "B S d_model"],
        self_mask: Bool[Tensor, "#B #H #T #T"] | None = None,
        cross_mask: Bool[Tensor, "#B #H #T #S"] | None = None,
        tap: Tap = no_tap,
        training: bool | None = None,
    ) -> Float[Tensor, "B T d_model"]:
        """Return the decoder state of each target position.

        Args:
            x: One embedding per target position.
            memory: Encoder memory: one vector per source position.
            self_mask: Mask for self-attention. True if a query position may attend to a key position. If None, no mask
                is applied.
            cross_mask: Mask for cross-attention. True if a target position may attend to a memory position. If None, no
                mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            training: If True, dropout is enabled. If None, the mode of the enclosing Keras layer is used.
        """
        self_mask, cross_mask = attention_mask_for(x, self_mask), attention_mask_for(memory, cross_mask)
        masks = {"self_mask": self_mask, "cross_mask": cross_mask}
        length = tf.shape(x)[1]
        bias = self._bias(0, length, length, tap)
        for i, layer in enumerate(self.layers):
            if self.activation_checkpointing and tap is no_tap:
                x = layer.recomputed(x, memory, bias=bias, **masks, training=training)
            else:
                x = layer(x, memory, **masks, tap=within(tap, f"layers.{i}"), bias=bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.dropout(tap("output", x))

    def init_cache(
        self,
        memory: Float[Tensor, "B S d_model"],
        cross_mask: Bool[Tensor, "B 1 1 S"],
        positions: Float[Tensor, "capacity d_model"],
        beam_size: int | Int[Tensor, ""] = 1,
    ) -> DecoderCache:
        """Return a cache with empty buffers for the target positions, and the keys and values of the encoder memory.

        Args:
            memory: Encoder memory: one vector per source position.
            cross_mask: True for source positions that contain a token.
            positions: Positional encodings that are added to the embeddings. Their number is the capacity of the cache.
            beam_size: Number of hypotheses per sequence.
        """
        projected = [layer.cross_attention.project(memory) for layer in self.layers]
        rows, capacity = keras.ops.shape(memory)[0] * beam_size, keras.ops.shape(positions)[0]
        past = [
            KeyValueCache(*(tf.zeros([rows, x.shape[1], capacity, x.shape[3]], x.dtype) for x in key_values))
            for layer, key_values in zip(self.layers, projected, strict=True)
            if layer.self_attention is not None
        ]
        return DecoderCache(projected, past, cross_mask, tf.zeros([rows, 1, 1, capacity], tf.bool), positions)

    def step(
        self, x: Float[Tensor, "R L d_model"], cache: DecoderCache, tap: Tap = no_tap
    ) -> Float[Tensor, "R L d_model"]:
        """Return the decoder states of the next target positions, and append their keys and values to the cache.

        Args:
            x: One embedding for each of the next target positions.
            cache: Cache from ``init_cache``. It is updated in place.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
        """
        mask = cache.self_mask
        if x.shape[1] != 1:
            n = cache.length + tf.range(tf.shape(x)[1])
            mask &= n[:, None] >= tf.range(tf.shape(mask)[3])
        bias = self._bias(cache.length, tf.shape(x)[1], tf.shape(mask)[3], tap)
        stored = iter(cache.past)
        pasts = [next(stored) if layer.self_attention is not None else None for layer in self.layers]
        for i, (layer, memory, past) in enumerate(zip(self.layers, cache.memory, pasts, strict=True)):
            x = layer(x, memory, mask, cache.cross_mask, tap=within(tap, f"layers.{i}"), past=past, bias=bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.dropout(tap("output", x))

    def _bias(self, first, queries, keys, tap):
        """Return the relative position bias, or None if the model has no bias.

        ``queries`` and ``keys`` are numbers of positions. The first query is at position ``first``.
        """
        if self.relative_bias is None:
            return None
        positions = first + tf.range(queries)
        distance = tf.range(keys) - positions[:, None]
        return tap("relative_bias.output", self.relative_bias(distance))  # [1, H, L, M]
