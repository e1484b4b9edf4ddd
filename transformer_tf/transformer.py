"""The Transformer (Vaswani et al., 2017, Figure 1).

B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.checks import check_integer, check_positions, check_same_batch
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, checked, no_tap, within
from transformer_tf.decoder import DecoderCache
from transformer_tf.masks import causal_mask
from transformer_tf.part import Part
from transformer_tf.runtime import as_placed


class Encoder(Part):
    """Map source tokens to the memory: the left half of Figure 1, alone.

    Taps:
        ``source_embedding.output`` (before dropout), those of the stack under ``encoder``.
    """

    part: str | None = "encoder"

    @as_placed
    def encode(
        self,
        source_ids: Int[Tensor, "B S"],
        source_mask: Bool[Tensor, "B S"] | None = None,
        tap: Tap = no_tap,
        training: bool | None = None,
    ) -> Float[Tensor, "B S d_model"]:
        """Return the memory: one vector per source position. Arguments and errors as in ``Transformer``."""
        source_ids, source_mask = self._take("source", source_ids, source_mask)
        return self._encode(source_ids, source_mask, tap, training)

    call = encode

    def _encode(self, source_ids, source_mask, tap=no_tap, training=None):
        """Return the memory of ids and a mask that have been checked."""
        tap = checked(tap)
        x = self.source_position(self.source_embedding(source_ids))  # [B, S, d_model]
        if self.source_embedding_norm is not None:
            x = self.source_embedding_norm(x)
        x = self.dropout(tap("source_embedding.output", x), training=training)
        return self.encoder(x, mask=source_mask, tap=within(tap, "encoder"), training=training)

    def compute_mask(self, source_ids: Int[Tensor, "B S"], previous_mask: Any = None) -> Bool[Tensor, "B S"] | None:
        """Return True for tokens. Keras attaches it to the memory, so that layers such as pooling ignore padding."""
        return keras.ops.not_equal(source_ids, self.config.pad_id)


class Decoder(Part):
    """Map target tokens and the memory to the logits of each next target token: the right half of Figure 1, alone.

    Taps:
        ``target_embedding.output`` (before dropout), those of the stack under ``decoder``, ``logits``.
    """

    part: str | None = "decoder"

    @as_placed
    def decode(
        self,
        target_ids: Int[Tensor, "B T"],
        memory: Float[Tensor, "B S d_model"],
        source_ids: Int[Tensor, "B S"] | None = None,
        target_mask: Bool[Tensor, "B T"] | None = None,
        source_mask: Bool[Tensor, "B S"] | None = None,
        tap: Tap = no_tap,
        training: bool | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits, given the memory. Arguments and errors as in ``Transformer``.

        Source ids or source mask mark the padding of the memory; where both are given, the mask counts.
        """
        memory, source_mask = self._take_memory(memory, source_ids, source_mask)
        target_ids, target_mask = self._take("target", target_ids, target_mask)
        check_same_batch(tuple(memory.shape), tuple(target_ids.shape))
        return self._decode(target_ids, memory, target_mask, source_mask, tap, training)

    call = decode

    def _decode(self, target_ids, memory, target_mask, source_mask, tap=no_tap, training=None):
        """Return the logits of ids, memory and masks that have been checked."""
        memory = tf.identity(memory)  # without Keras' own mask, which ``source_mask`` replaces
        tap = checked(tap)
        x = self.target_position(self.target_embedding(target_ids))  # [B, T, d_model]
        if self.target_embedding_norm is not None:
            x = self.target_embedding_norm(x)
        x = self.dropout(tap("target_embedding.output", x), training=training)
        self_mask = causal_mask(keras.ops.shape(x)[1]) & target_mask[:, None, None, :]  # [B, 1, T, T]
        cross_mask = source_mask[:, None, None, :]  # [B, 1, 1, S]
        x = self.decoder(x, memory, self_mask, cross_mask, tap=within(tap, "decoder"), training=training)
        return tap("logits", self.output_proj(x))

    @as_placed
    def init_cache(
        self,
        source_ids: Int[Tensor, "B S"] | None,
        capacity: int | Int[Tensor, ""],
        beam_size: int | Int[Tensor, ""] = 1,
        source_mask: Bool[Tensor, "B S"] | None = None,
        memory: Float[Tensor, "B S d_model"] | None = None,
    ) -> DecoderCache:
        """Return what ``decode_step`` needs to decode one target position after another.

        Args:
            source_ids: The source sentences, padded with ``config.pad_id``; None where memory and mask are given.
            capacity: How many target positions there is room for, that of the start symbol included.
            beam_size: How many hypotheses of each sentence are decoded at a time.
            source_mask: True where a source position holds a token. None derives it from the ids.
            memory: What ``encode`` returns for the source. A decoder alone requires it.

        Raises:
            TypeError: Ids or sizes that are not integers, a mask that is not boolean, or a memory of another dtype.
            ValueError: Ids, mask or memory of the wrong shape, ids outside the vocabulary, or too many positions.
        """
        if not tf.is_tensor(capacity):  # which it may be in a function that is traced once for all sizes
            capacity = check_positions("capacity", capacity, self.config.max_positions)
            beam_size = check_integer("beam_size", beam_size, minimum=1)
        memory, source_mask = self._take_memory_for_cache(memory, source_ids, source_mask)
        positions = tf.cast(self.target_position.vectors(capacity), memory.dtype)  # [capacity, d_model]
        return self.decoder.init_cache(memory, source_mask[:, None, None, :], positions, beam_size)

    @as_placed
    def decode_step(
        self, target_ids: Int[Tensor, " R"] | Int[Tensor, "R L"], cache: DecoderCache, tap: Tap = no_tap
    ) -> tuple[Float[Tensor, "R V"] | Float[Tensor, "R L V"], DecoderCache]:
        """Return the logits of the token after each of the next target positions, as ``decode`` returns them.

        Args:
            target_ids: The token at the next position of each hypothesis [R], or the tokens at several positions
                [R, L], such as a prefix. Hypotheses of one sentence are side by side.
            cache: From ``init_cache`` or the last step. It isn't changed.
            tap: Receives each named intermediate and returns the value to go on with.

        Returns:
            The logits, [R, V] or [R, L, V], and the cache for the next step.

        Raises:
            TypeError: If the ids are not integers.
            ValueError: If ids are outside the vocabulary, don't match the hypotheses, or exceed the cache's capacity.
        """
        is_one = len(np.shape(target_ids)) == 1
        ids = self._take_next(target_ids, cache)  # [R, L]
        cache = tf.nest.map_structure(lambda x: x, cache)  # a copy: the caller's stays as it is
        tap, n = checked(tap), cache.length + tf.range(tf.shape(ids)[1])
        holds_token = (ids != self.config.pad_id) | (n == 0)  # as in target_padding_mask
        new = [0, 0, 0, cache.length]
        cache.self_mask = keras.ops.slice_update(cache.self_mask, new, holds_token[:, None, None, :])
        x = self.target_embedding(ids) + tf.gather(cache.positions, n)  # [R, L, d_model]
        if self.target_embedding_norm is not None:
            x = self.target_embedding_norm(x)
        x = self.decoder.step(tap("target_embedding.output", x), cache, within(tap, "decoder"))
        logits = tap("logits", self.output_proj(x))
        return (logits[:, 0] if is_one else logits), cache


class Transformer(Encoder, Decoder):
    """Map source tokens and the target tokens so far to the logits of each next target token.

    Taps:
        ``source_embedding.output``, the encoder's, ``target_embedding.output``, the decoder's, ``logits``.
    """

    part: str | None = None
    compute_mask = keras.Model.compute_mask  # the logits belong to target positions

    def call(
        self,
        source_ids: Int[Tensor, "B S"],
        target_ids: Int[Tensor, "B T"],
        source_mask: Bool[Tensor, "B S"] | None = None,
        target_mask: Bool[Tensor, "B T"] | None = None,
        tap: Tap = no_tap,
        training: bool | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits of the token after each target position.

        Args:
            source_ids: The source sentences, padded with ``config.pad_id``.
            target_ids: The target sentences so far, starting with ``config.bos_id``, padded likewise.
            source_mask: True where a source position holds a token. None derives it from the ids.
            target_mask: True where a target position holds a token. None derives it from the ids.
            tap: Receives each named intermediate and returns the value to go on with.
            training: Applies dropout.

        Raises:
            TypeError: Ids that are not integers, or a mask that is not boolean.
            ValueError: Ids or masks of the wrong shape, ids outside the vocabulary, or too many positions.
        """
        if source_mask is None or target_mask is None:  # not by `__call__`: Keras builds a functional model
            taken = self._take_both(source_ids, target_ids, source_mask, target_mask)
            return self.call(**taken, tap=tap, training=training)
        memory = self._encode(source_ids, source_mask, tap, training)
        return self._decode(target_ids, memory, target_mask, source_mask, tap, training)

    def _take_memory_for_cache(self, memory, ids, mask):
        """Return the memory and the mask of its source, checked; a memory of None is computed from the source."""
        if memory is None:
            memory = self.encode(ids, mask, training=False)
        return self._take_memory(memory, ids, mask)


load_transformer = Transformer.from_file
