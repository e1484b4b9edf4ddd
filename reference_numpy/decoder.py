"""The decoder (Vaswani et al., 2017, section 3.1, right half of Figure 1).

Axes: B batch, S source length, T target length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from reference_numpy.attention import KeyValueCache, KeyValues, MultiHeadAttention
from reference_numpy.feed_forward import make_feed_forward
from reference_numpy.layers import Dropout, make_norm
from reference_numpy.masks import causal_mask
from reference_numpy.relative_position import RelativePositionBias
from transformer_spec.checks import check_rows
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap, within


class DecoderLayer:
    """Decoder layer: masked self-attention, cross-attention, and a feed-forward network (section 3.1).

    The output of each sublayer is ``LayerNorm(x + Sublayer(x))`` if ``config.norm_order`` is ``post``, as in the paper,
    and ``x + Sublayer(LayerNorm(x))`` if it is ``pre``.

    Args:
        config: Model configuration.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.
        with_self_attention: If False, the self-attention and its layer norm are omitted. See
            ``config.skip_first_self_attention``.

    Taps:
        self_attention, cross_attention, feed_forward: Prefixes of the sublayers' taps.
        self_attention_norm.output, cross_attention_norm.output, feed_forward_norm.output: Outputs of the layer norms.
        output: Output of the layer.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", with_self_attention: bool = True) -> None:
        config = config.in_decoder
        self.norm_order = config.norm_order
        self.self_attention = MultiHeadAttention(config, dtype) if with_self_attention else None
        self.self_attention_norm = make_norm(config, dtype) if with_self_attention else None
        self.cross_attention = MultiHeadAttention(config, dtype)
        self.cross_attention_norm = make_norm(config, dtype)
        self.feed_forward = make_feed_forward(config, dtype)
        self.feed_forward_norm = make_norm(config, dtype)
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
        bias: Float[ndarray, "1 H T M"] | None = None,
    ) -> Float[ndarray, "B T d_model"]:
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
            rng: Random generator for dropout. If None, dropout is disabled (inference).
            past: Cache of the keys and values of earlier target positions, for decoding step by step. None means that
                ``x`` contains all positions.
            bias: Relative position bias of self-attention. If None, no bias is added.
        """
        if self.norm_order == "post":
            if self.self_attention and self.self_attention_norm:
                attended = self.self_attention(x, x, self_mask, within(tap, "self_attention"), rng, past, bias)
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
                attended = self.self_attention(
                    normed, normed, self_mask, within(tap, "self_attention"), rng, past, bias
                )
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
        length: Number of target positions decoded so far.
    """

    memory: list[KeyValues]
    past: list[KeyValueCache]
    cross_mask: Bool[ndarray, "B 1 1 S"]
    self_mask: Bool[ndarray, "R 1 1 capacity"]
    positions: Float[ndarray, "capacity d_model"]
    length: int = 0

    def reorder(self, rows: Int[ndarray, " R"]) -> None:
        """Replace the hypothesis in row i with the hypothesis in row ``rows[i]``.

        Beam search uses this method to drop some hypotheses and to duplicate others.

        Args:
            rows: For each row of the result, the index of the row to copy, which must contain a hypothesis of the same
                source sequence.

        Raises:
            ValueError: If a row contains a hypothesis of a different source sequence.
        """
        check_rows(rows, len(self.self_mask), len(self.cross_mask))
        self.self_mask = self.self_mask[rows]
        for past in self.past:
            past.reorder(rows)


class DecoderStack:
    """Decoder stack: a sequence of decoder layers that maps the embedded target and the memory to decoder states.

    Args:
        config: Model configuration, which defines the number of layers and whether the stack ends with a layer norm.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.

    Taps:
        relative_bias.output: Relative position bias, if ``config.position_encoding`` is ``relative``.
        layers.{i}: Prefix of the taps of layer i.
        output: Output of the stack, before dropout.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        is_relative = config.position_encoding == "relative"
        self.relative_bias = (
            RelativePositionBias(config.in_decoder, dtype, bidirectional=False) if is_relative else None
        )
        self.layers = [
            DecoderLayer(config, dtype, config.has_self_attention(i)) for i in range(config.num_decoder_layers)
        ]
        self.final_norm = make_norm(config, dtype) if config.final_norm else None
        self.dropout = Dropout(config.dropout.final)

    def __call__(
        self,
        x: Float[ndarray, "B T d_model"],
        memory: Float[ndarray, "B S d_model"],
        self_mask: Bool[ndarray, "#B #H #T #T"] | None = None,
        cross_mask: Bool[ndarray, "#B #H #T #S"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
    ) -> Float[ndarray, "B T d_model"]:
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
            rng: Random generator for dropout. If None, dropout is disabled (inference).
        """
        bias = self._bias(0, x.shape[1], x.shape[1], tap)
        for i, layer in enumerate(self.layers):
            x = layer(x, memory, self_mask, cross_mask, within(tap, f"layers.{i}"), rng, bias=bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.dropout(tap("output", x), rng, tap, "output")

    def init_cache(
        self,
        memory: Float[ndarray, "B S d_model"],
        cross_mask: Bool[ndarray, "B 1 1 S"],
        positions: Float[ndarray, "capacity d_model"],
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
            KeyValueCache(*(np.zeros((rows, x.shape[1], capacity, x.shape[3]), x.dtype) for x in key_values))
            for layer, key_values in zip(self.layers, projected, strict=True)
            if layer.self_attention is not None
        ]
        return DecoderCache(projected, past, cross_mask, np.zeros((rows, 1, 1, capacity), bool), positions)

    def step(
        self, x: Float[ndarray, "R L d_model"], cache: DecoderCache, tap: Tap = no_tap
    ) -> Float[ndarray, "R L d_model"]:
        """Return the decoder states of the next target positions, and append their keys and values to the cache.

        The caller then increases ``cache.length``. If a step fails, the next step overwrites the keys and values of the
        failed step.

        Args:
            x: One embedding for each of the next target positions.
            cache: Cache from ``init_cache``. Its arrays are updated in place.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
        """
        end = cache.length + x.shape[1]
        self_mask = cache.self_mask[..., :end] & causal_mask(end)[cache.length :]
        for key_values in cache.past:
            key_values.length = cache.length
        stored = iter(cache.past)
        pasts = [next(stored) if layer.self_attention is not None else None for layer in self.layers]
        bias = self._bias(cache.length, x.shape[1], end, tap)
        for i, (layer, memory, past) in enumerate(zip(self.layers, cache.memory, pasts, strict=True)):
            x = layer(x, memory, self_mask, cache.cross_mask, within(tap, f"layers.{i}"), past=past, bias=bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return tap("output", x)

    def _bias(self, first, queries, keys, tap):
        """Return the relative position bias, or None if the model has no bias.

        ``queries`` and ``keys`` are numbers of positions. The first query is at position ``first``.
        """
        if self.relative_bias is None:
            return None
        positions = first + np.arange(queries)
        distance = np.arange(keys) - positions[:, None]
        return tap("relative_bias.output", self.relative_bias(distance))  # [1, H, L, M]
