"""The decoder (Vaswani et al., 2017, section 3.1, right half of Figure 1).

Axes: B batch, S source length, T target length.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from transformer_jax.attention import KeyValueCache, KeyValues, MultiHeadAttention
from transformer_jax.feed_forward import make_feed_forward
from transformer_jax.layers import Dropout, make_norm
from transformer_jax.relative_position import RelativePositionBias
from transformer_jax.runtime import to_rows
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap, within


class DecoderLayer(nnx.Module):
    """Decoder layer: masked self-attention, cross-attention, and a feed-forward network (section 3.1).

    The output of each sublayer is ``LayerNorm(x + Sublayer(x))`` if ``config.norm_order`` is ``post``, as in the paper,
    and ``x + Sublayer(LayerNorm(x))`` if it is ``pre``.

    Args:
        config: Model configuration.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        with_self_attention: If False, the self-attention and its layer norm are omitted. See
            ``config.skip_first_self_attention``.
        rngs: Flax random state for the initial values and dropout.

    Taps:
        self_attention, cross_attention, feed_forward: Prefixes of the sublayers' taps.
        self_attention_norm.output, cross_attention_norm.output, feed_forward_norm.output: Outputs of the layer norms.
        output: Output of the layer.
    """

    def __init__(
        self, config: TransformerConfig, dtype: str = "float32", with_self_attention: bool = True, *, rngs: nnx.Rngs
    ) -> None:
        config = config.in_decoder
        self.norm_order = config.norm_order
        self.self_attention = MultiHeadAttention(config, dtype, rngs=rngs) if with_self_attention else None
        self.self_attention_norm = make_norm(config, dtype, rngs=rngs) if with_self_attention else None
        self.cross_attention = MultiHeadAttention(config, dtype, rngs=rngs)
        self.cross_attention_norm = make_norm(config, dtype, rngs=rngs)
        self.feed_forward = make_feed_forward(config, dtype, rngs=rngs)
        self.feed_forward_norm = make_norm(config, dtype, rngs=rngs)
        self.dropout = Dropout(config.dropout.residual, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T d_model"],
        memory: Float[Array, "B S d_model"] | KeyValues,
        self_mask: Bool[Array, "#B #H #T #M"] | None = None,
        cross_mask: Bool[Array, "#N #H #T #S"] | None = None,
        tap: Tap = no_tap,
        past: KeyValueCache | None = None,
        bias: Float[Array, "1 H T M"] | None = None,
    ) -> Float[Array, "B T d_model"]:
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
                attended = self.self_attention(x, x, self_mask, within(tap, "self_attention"), past, bias)
                x = tap("self_attention_norm.output", self.self_attention_norm(x + self.dropout(attended)))
            attended = self.cross_attention(x, memory, cross_mask, within(tap, "cross_attention"))
            x = tap("cross_attention_norm.output", self.cross_attention_norm(x + self.dropout(attended)))
            transformed = self.feed_forward(x, within(tap, "feed_forward"))
            x = tap("feed_forward_norm.output", self.feed_forward_norm(x + self.dropout(transformed)))
        else:
            if self.self_attention and self.self_attention_norm:
                normed = tap("self_attention_norm.output", self.self_attention_norm(x))
                attended = self.self_attention(normed, normed, self_mask, within(tap, "self_attention"), past, bias)
                x = x + self.dropout(attended)
            normed = tap("cross_attention_norm.output", self.cross_attention_norm(x))
            x = x + self.dropout(self.cross_attention(normed, memory, cross_mask, within(tap, "cross_attention")))
            normed = tap("feed_forward_norm.output", self.feed_forward_norm(x))
            x = x + self.dropout(self.feed_forward(normed, within(tap, "feed_forward")))
        return tap("output", x)


@jax.tree_util.register_dataclass
@dataclass
class DecoderCache:
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
    cross_mask: Bool[Array, "B 1 1 S"]
    self_mask: Bool[Array, "R 1 1 capacity"]
    positions: Float[Array, "capacity d_model"]

    @property
    def length(self) -> Int[Array, ""] | int:
        """Number of target positions decoded so far."""
        return self.past[0].length

    def reorder(self, rows: Int[Array, " R"]) -> None:
        """Replace the hypothesis in row i with the hypothesis in row ``rows[i]``.

        Beam search uses this method to drop some hypotheses and to duplicate others.

        Args:
            rows: For each row of the result, the index of the row to copy, which must contain a hypothesis of the same
                source sequence.

        Raises:
            ValueError: If a row contains a hypothesis of a different source sequence. Rows are not checked under
                ``jax.jit`` or on a GPU.
        """
        rows = to_rows(rows, len(self.self_mask), len(self.cross_mask))
        self.self_mask = self.self_mask[rows]
        for past in self.past:
            past.reorder(rows)


class DecoderStack(nnx.Module):
    """Decoder stack: a sequence of decoder layers that maps the embedded target and the memory to decoder states.

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
        self.relative_bias = (
            RelativePositionBias(config.in_decoder, dtype, bidirectional=False, rngs=rngs) if is_relative else None
        )
        self.layers = nnx.List(
            DecoderLayer(config, dtype, config.has_self_attention(i), rngs=rngs)
            for i in range(config.num_decoder_layers)
        )
        self.final_norm = make_norm(config, dtype, rngs=rngs) if config.final_norm else None
        self.dropout = Dropout(config.dropout.final, rngs=rngs)
        self.activation_checkpointing = False  # a Trainer can set this to True during a step, to save memory

    def __call__(
        self,
        x: Float[Array, "B T d_model"],
        memory: Float[Array, "B S d_model"],
        self_mask: Bool[Array, "#B #H #T #T"] | None = None,
        cross_mask: Bool[Array, "#B #H #T #S"] | None = None,
        tap: Tap = no_tap,
    ) -> Float[Array, "B T d_model"]:
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
        """
        bias, masks = self._bias(0, x.shape[1], x.shape[1], tap), (self_mask, cross_mask)
        for i, layer in enumerate(self.layers):
            if self.activation_checkpointing and tap is no_tap:
                recomputed = nnx.remat(lambda layer, bias, *inputs: layer(*inputs, bias=bias))
                x = recomputed(layer, bias, x, memory, *masks)
            else:
                x = layer(x, memory, *masks, within(tap, f"layers.{i}"), bias=bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.dropout(tap("output", x))

    def init_cache(
        self,
        memory: Float[Array, "B S d_model"],
        cross_mask: Bool[Array, "B 1 1 S"],
        positions: Float[Array, "capacity d_model"],
        beam_size: int = 1,
    ) -> DecoderCache:
        """Return a cache with empty buffers for the target positions, and the keys and values of the encoder memory.

        Args:
            memory: Encoder memory: one vector per source position.
            cross_mask: True for source positions that contain a token.
            positions: Positional encodings that are added to the embeddings. Their number is the capacity of the cache.
            beam_size: Number of hypotheses per sequence.
        """
        projected = [layer.cross_attention.project(memory) for layer in self.layers]
        rows, capacity = len(memory) * beam_size, len(positions)
        past = [
            KeyValueCache(*(jnp.zeros((rows, x.shape[1], capacity, x.shape[3]), x.dtype) for x in key_values))
            for layer, key_values in zip(self.layers, projected, strict=True)
            if layer.self_attention is not None
        ]
        return DecoderCache(projected, past, cross_mask, jnp.zeros((rows, 1, 1, capacity), bool), positions)

    def step(
        self, x: Float[Array, "R L d_model"], cache: DecoderCache, tap: Tap = no_tap
    ) -> Float[Array, "R L d_model"]:
        """Return the decoder states of the next target positions, and append their keys and values to the cache.

        Args:
            x: One embedding for each of the next target positions.
            cache: Cache from ``init_cache``. It is updated in place.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
        """
        mask = cache.self_mask
        if x.shape[1] > 1:  # within one step, no position may attend to a later one
            last = cache.length + jnp.arange(x.shape[1])[:, None]
            mask = mask & (jnp.arange(mask.shape[3]) <= last)
        bias = self._bias(cache.length, x.shape[1], mask.shape[3], tap)
        stored = iter(cache.past)
        pasts = [next(stored) if layer.self_attention is not None else None for layer in self.layers]
        for i, (layer, memory, past) in enumerate(zip(self.layers, cache.memory, pasts, strict=True)):
            x = layer(x, memory, mask, cache.cross_mask, within(tap, f"layers.{i}"), past, bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.dropout(tap("output", x))

    def _bias(self, first, queries, keys, tap):
        """Return the relative position bias, or None if the model has no bias.

        ``queries`` and ``keys`` are numbers of positions. The first query is at position ``first``.
        """
        if self.relative_bias is None:
            return None
        positions = first + jnp.arange(queries)
        distance = jnp.arange(keys) - positions[:, None]
        return tap("relative_bias.output", self.relative_bias(distance))  # [1, H, L, M]
