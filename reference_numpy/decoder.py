"""The decoder (Vaswani et al., 2017, section 3.1, right half of Figure 1).

B batch, S source length, T target length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from reference_numpy.attention import KeyValueCache, KeyValues, MultiHeadAttention
from reference_numpy.feed_forward import PositionwiseFeedForward
from reference_numpy.layers import Dropout, LayerNorm
from reference_numpy.masks import causal_mask
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap, within


class DecoderLayer:
    """Let every target position gather from earlier ones, then from the source, then transform each on its own.

    Without self-attention, as the first layer may be, it begins with the source.
    Section 3.1: each sub-layer is ``LayerNorm(x + Sublayer(x))``; norm order ``pre`` is
    ``x + Sublayer(LayerNorm(x))`` instead.

    Taps:
        Those of the three sub-layers; ``self_attention_norm.output``, ``cross_attention_norm.output``,
        ``feed_forward_norm.output``; ``output``.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", with_self_attention: bool = True) -> None:
        config = config.in_decoder
        self.norm_order = config.norm_order
        self.self_attention = MultiHeadAttention(config, dtype) if with_self_attention else None
        self.self_attention_norm = LayerNorm(config, dtype) if with_self_attention else None
        self.cross_attention = MultiHeadAttention(config, dtype)
        self.cross_attention_norm = LayerNorm(config, dtype)
        self.feed_forward = PositionwiseFeedForward(config, dtype)
        self.feed_forward_norm = LayerNorm(config, dtype)
        self.dropout = Dropout(config.dropout.residual)

    def __call__(
        self,
        x: Float[ndarray, "B T d_model"],
        memory: Float[ndarray, "B S d_model"] | KeyValues,
        self_mask: Bool[ndarray, "#B #H #T #M"] | None = None,
        cross_mask: Bool[ndarray, "#N #H #T #S"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
        past: KeyValueCache | None = None,
    ) -> Float[ndarray, "B T d_model"]:
        """Return the layer's output for each target position; True in a mask = may attend.

        While decoding, ``memory`` is its keys and values, and ``past`` has those of earlier target positions.
        """
        if self.norm_order == "post":
            if self.self_attention and self.self_attention_norm:
                attended = self.self_attention(x, x, self_mask, within(tap, "self_attention"), rng, past)
                attended = self.dropout(attended, rng, tap, "self_attention.output")
                x = tap("self_attention_norm.output", self.self_attention_norm(x + attended))
            attended = self.cross_attention(x, memory, cross_mask, within(tap, "cross_attention"), rng)
            attended = self.dropout(attended, rng, tap, "cross_attention.output")
            x = tap("cross_attention_norm.output", self.cross_attention_norm(x + attended))
            transformed = self.feed_forward(x, within(tap, "feed_forward"), rng)
            transformed = self.dropout(transformed, rng, tap, "feed_forward.output")
            x = tap("feed_forward_norm.output", self.feed_forward_norm(x + transformed))
        else:
            if self.self_attention and self.self_attention_norm:
                normed = tap("self_attention_norm.output", self.self_attention_norm(x))
                attended = self.self_attention(normed, normed, self_mask, within(tap, "self_attention"), rng, past)
                x = x + self.dropout(attended, rng, tap, "self_attention.output")
            normed = tap("cross_attention_norm.output", self.cross_attention_norm(x))
            attended = self.cross_attention(normed, memory, cross_mask, within(tap, "cross_attention"), rng)
            x = x + self.dropout(attended, rng, tap, "cross_attention.output")
            normed = tap("feed_forward_norm.output", self.feed_forward_norm(x))
            transformed = self.feed_forward(normed, within(tap, "feed_forward"), rng)
            x = x + self.dropout(transformed, rng, tap, "feed_forward.output")
        return tap("output", x)


@dataclass
class DecoderCache:
    """What the decoder keeps while it decodes one token after another.

    R rows: the hypotheses of all sentences, those of one sentence side by side.

    Attributes:
        memory: The source's keys and values, layer by layer; the hypotheses of a sentence share them.
        past: The keys and values of the target so far, of each layer that has self-attention.
        cross_mask: True where a source position holds a token.
        self_mask: True where a target position holds a token.
        positions: What is added to the embedding at each target position.
    """

    memory: list[KeyValues]
    past: list[KeyValueCache]
    cross_mask: Bool[ndarray, "B 1 1 S"]
    self_mask: Bool[ndarray, "R 1 1 capacity"]
    positions: Float[ndarray, "capacity d_model"]

    @property
    def length(self) -> int:
        """How many target positions it holds."""
        return self.past[0].length

    def reorder(self, rows: Int[ndarray, " R"]) -> None:
        """Let each hypothesis go on from another one: some are dropped, others go on in several ways."""
        self.self_mask = self.self_mask[rows]
        for past in self.past:
            past.reorder(rows)


class DecoderStack:
    """Turn the embedded target and the memory into one state per target position: a stack of decoder layers.

    Taps:
        Those of each layer under ``layers.{i}``; ``output``.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.layers = [
            DecoderLayer(config, dtype, config.has_self_attention(i)) for i in range(config.num_decoder_layers)
        ]
        self.final_norm = LayerNorm(config, dtype) if config.final_norm else None

    def __call__(
        self,
        x: Float[ndarray, "B T d_model"],
        memory: Float[ndarray, "B S d_model"],
        self_mask: Bool[ndarray, "#B #H #T #T"] | None = None,
        cross_mask: Bool[ndarray, "#B #H #T #S"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
    ) -> Float[ndarray, "B T d_model"]:
        """Return the decoder's state for each target position; True in a mask = may attend."""
        for i, layer in enumerate(self.layers):
            x = layer(x, memory, self_mask, cross_mask, within(tap, f"layers.{i}"), rng)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return tap("output", x)

    def init_cache(
        self,
        memory: Float[ndarray, "B S d_model"],
        cross_mask: Bool[ndarray, "B 1 1 S"],
        positions: Float[ndarray, "capacity d_model"],
        beam_size: int = 1,
    ) -> DecoderCache:
        """Return a cache that holds the memory's keys and values, and has room for the target's."""
        projected = [layer.cross_attention.project(memory) for layer in self.layers]
        rows, capacity = len(memory) * beam_size, len(positions)
        past = [
            KeyValueCache(*(np.zeros((rows, x.shape[1], capacity, x.shape[3]), x.dtype) for x in key_values))
            for layer, key_values in zip(self.layers, projected, strict=True)
            if layer.self_attention is not None
        ]
        return DecoderCache(projected, past, cross_mask, np.zeros((rows, 1, 1, capacity), bool), positions)

    def step(
        self, x: Float[ndarray, "R L d_model"], cache: DecoderCache, tap: Tap = no_tap
    ) -> Float[ndarray, "R L d_model"]:
        """Return the decoder's state at the next target positions, and add these to the cache."""
        end = cache.length + x.shape[1]
        self_mask = cache.self_mask[..., :end] & causal_mask(end)[cache.length :]
        pasts = [None] * (len(self.layers) - len(cache.past)) + cache.past  # the first may have no self-attention
        for i, (layer, memory, past) in enumerate(zip(self.layers, cache.memory, pasts, strict=True)):
            x = layer(x, memory, self_mask, cache.cross_mask, within(tap, f"layers.{i}"), past=past)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return tap("output", x)
