"""The decoder (Vaswani et al., 2017, section 3.1, right half of Figure 1).

B batch, S source length, T target length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap, within
from transformer_torch.attention import KeyValueCache, KeyValues, MultiHeadAttention
from transformer_torch.feed_forward import PositionwiseFeedForward
from transformer_torch.layers import Dropout, LayerNorm
from transformer_torch.masks import causal_mask


class DecoderLayer(nn.Module):
    """Let every target position gather from earlier ones, then from the source, then transform each on its own.

    Without self-attention, as the first layer may be, it begins with the source.
    Section 3.1: each sub-layer is ``LayerNorm(x + Sublayer(x))``; norm order ``pre`` is
    ``x + Sublayer(LayerNorm(x))`` instead.

    Taps:
        Those of the three sub-layers; ``self_attention_norm.output``, ``cross_attention_norm.output``,
        ``feed_forward_norm.output``; ``output``.
    """

    def __init__(
        self, config: TransformerConfig, dtype: torch.dtype | str = "float32", with_self_attention: bool = True
    ) -> None:
        super().__init__()
        config = config.in_decoder
        self.norm_order = config.norm_order
        self.self_attention = MultiHeadAttention(config, dtype) if with_self_attention else None
        self.self_attention_norm = LayerNorm(config, dtype) if with_self_attention else None
        self.cross_attention = MultiHeadAttention(config, dtype)
        self.cross_attention_norm = LayerNorm(config, dtype)
        self.feed_forward = PositionwiseFeedForward(config, dtype)
        self.feed_forward_norm = LayerNorm(config, dtype)
        self.dropout = Dropout(config.dropout.residual)

    def forward(
        self,
        x: Float[Tensor, "B T d_model"],
        memory: Float[Tensor, "B S d_model"] | KeyValues,
        self_mask: Bool[Tensor, "#B #H #T #M"] | None = None,
        cross_mask: Bool[Tensor, "#N #H #T #S"] | None = None,
        tap: Tap = no_tap,
        past: KeyValueCache | None = None,
    ) -> Float[Tensor, "B T d_model"]:
        """Return the layer's output for each target position; True in a mask = may attend.

        While decoding, ``memory`` is its keys and values, and ``past`` has those of earlier target positions.
        """
        if self.norm_order == "post":
            if self.self_attention is not None and self.self_attention_norm is not None:
                attended = self.self_attention(x, x, self_mask, within(tap, "self_attention"), past)
                x = tap("self_attention_norm.output", self.self_attention_norm(x + self.dropout(attended)))
            attended = self.cross_attention(x, memory, cross_mask, within(tap, "cross_attention"))
            x = tap("cross_attention_norm.output", self.cross_attention_norm(x + self.dropout(attended)))
            transformed = self.feed_forward(x, within(tap, "feed_forward"))
            x = tap("feed_forward_norm.output", self.feed_forward_norm(x + self.dropout(transformed)))
        else:
            if self.self_attention is not None and self.self_attention_norm is not None:
                normed = tap("self_attention_norm.output", self.self_attention_norm(x))
                attended = self.self_attention(normed, normed, self_mask, within(tap, "self_attention"), past)
                x = x + self.dropout(attended)
            normed = tap("cross_attention_norm.output", self.cross_attention_norm(x))
            x = x + self.dropout(self.cross_attention(normed, memory, cross_mask, within(tap, "cross_attention")))
            normed = tap("feed_forward_norm.output", self.feed_forward_norm(x))
            x = x + self.dropout(self.feed_forward(normed, within(tap, "feed_forward")))
        return tap("output", x)


@dataclass
class DecoderCache:
    """What the decoder keeps while it decodes one token after another.

    R rows: the hypotheses of all sentences, those of one sentence side by side.

    Attributes:
        memory: The source's keys and values, layer by layer; the hypotheses of a sentence share them.
        past: Buffers for the target's keys and values, for each layer that has self-attention.
        cross_mask: True if a source position holds a token.
        self_mask: True if a target position holds a token.
        positions: Vectors that are added to the embedding, one for each target position.
        length: Number of target positions so far. All layers share this one, so torch.compile sees one variable.
    """

    memory: list[KeyValues]
    past: list[KeyValueCache]
    cross_mask: Bool[Tensor, "B 1 1 S"]
    self_mask: Bool[Tensor, "R 1 1 capacity"]
    positions: Float[Tensor, "capacity d_model"]
    length: int = 0

    def reorder(self, rows: Int[Tensor, " R"]) -> None:
        """Continue each hypothesis from a different one: some are dropped, some are continued in several ways."""
        self.self_mask = self.self_mask[rows]
        for past in self.past:
            KeyValueCache(past.key, past.value, self.length).reorder(rows)


class DecoderStack(nn.Module):
    """Turn the embedded target and the memory into one state per target position: a stack of decoder layers.

    Taps:
        Those of each layer under ``layers.{i}``; ``output``.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DecoderLayer(config, dtype, config.has_self_attention(i)) for i in range(config.num_decoder_layers)
        )
        self.final_norm = LayerNorm(config, dtype) if config.final_norm else None
        self.activation_checkpointing = False  # a Trainer switches it on for a step that is to save memory

    def forward(
        self,
        x: Float[Tensor, "B T d_model"],
        memory: Float[Tensor, "B S d_model"],
        self_mask: Bool[Tensor, "#B #H #T #T"] | None = None,
        cross_mask: Bool[Tensor, "#B #H #T #S"] | None = None,
        tap: Tap = no_tap,
    ) -> Float[Tensor, "B T d_model"]:
        """Return the decoder's state for each target position; True in a mask = may attend."""
        for i, layer in enumerate(self.layers):
            if self.activation_checkpointing and tap is no_tap:
                x = checkpoint(layer, x, memory, self_mask, cross_mask, use_reentrant=False)
            else:
                x = layer(x, memory, self_mask, cross_mask, within(tap, f"layers.{i}"))
        if self.final_norm is not None:
            x = self.final_norm(x)
        return tap("output", x)

    def init_cache(
        self,
        memory: Float[Tensor, "B S d_model"],
        cross_mask: Bool[Tensor, "B 1 1 S"],
        positions: Float[Tensor, "capacity d_model"],
        beam_size: int = 1,
    ) -> DecoderCache:
        """Return a cache that holds the memory's keys and values, and has room for the target's."""
        projected = [layer.cross_attention.project(memory) for layer in self.layers]  # type: ignore[union-attr, operator]
        rows, capacity = len(memory) * beam_size, len(positions)
        past = [
            KeyValueCache(*(x.new_zeros(rows, x.shape[1], capacity, x.shape[3]) for x in key_values))
            for layer, key_values in zip(self.layers, projected, strict=True)
            if layer.self_attention is not None
        ]
        self_mask = torch.zeros(rows, 1, 1, capacity, dtype=torch.bool, device=memory.device)
        return DecoderCache(projected, past, cross_mask, self_mask, positions)

    def step(
        self, x: Float[Tensor, "R L d_model"], cache: DecoderCache, tap: Tap = no_tap
    ) -> Float[Tensor, "R L d_model"]:
        """Return the decoder's state at the next target positions, and add them to the cache."""
        n, end = cache.length, cache.length + x.shape[1]
        self_mask = cache.self_mask[..., :end]
        if x.shape[1] > 1:
            self_mask = self_mask & causal_mask(end, x.device)[n:]
        pasts = [None] * (len(self.layers) - len(cache.past)) + cache.past  # the first may have no self-attention
        for i, (layer, memory, past) in enumerate(zip(self.layers, cache.memory, pasts, strict=True)):
            own = KeyValueCache(past.key, past.value, n) if past else None
            x = layer(x, memory, self_mask, cache.cross_mask, within(tap, f"layers.{i}"), own)
        cache.length = end
        if self.final_norm is not None:
            x = self.final_norm(x)
        return tap("output", x)
