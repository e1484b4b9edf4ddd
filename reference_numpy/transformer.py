"""The Transformer (Vaswani et al., 2017, Figure 1).

B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from reference_numpy.decoder import DecoderCache
from reference_numpy.functional import UNDERFLOW
from reference_numpy.masks import causal_mask
from reference_numpy.part import Part
from reference_numpy.runtime import to_ids
from transformer_spec.checks import check_integer, check_next_ids, check_positions, check_room, check_same_batch
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, checked, no_tap, within


class Encoder(Part):
    """Map source tokens to the memory: the left half of Figure 1, alone.

    Taps:
        ``source_embedding.output`` (before dropout), those of the stack under ``encoder``.
    """

    part: str | None = "encoder"

    def encode(
        self,
        source_ids: Int[ndarray, "B S"],
        source_mask: Bool[ndarray, "B S"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
    ) -> Float[ndarray, "B S d_model"]:
        """Return the memory: one vector per source position. Arguments and errors as in ``Transformer``."""
        source_ids, source_mask = self._take("source", source_ids, source_mask)
        return self._encode(source_ids, source_mask, tap, rng)

    __call__ = encode

    @UNDERFLOW
    def _encode(self, source_ids, source_mask, tap=no_tap, rng=None):
        """Return the memory of ids and a mask that have been checked."""
        tap = checked(tap)
        x = self.source_position(self.source_embedding(source_ids))  # [B, S, d_model]
        if self.source_embedding_norm is not None:
            x = self.source_embedding_norm(x)
        x = self.dropout(tap("source_embedding.output", x), rng, tap, "source_embedding.output")
        return self.encoder(x, source_mask[:, None, None, :], within(tap, "encoder"), rng)


class Decoder(Part):
    """Map target tokens and the memory to the logits of each next target token: the right half of Figure 1, alone.

    Taps:
        ``target_embedding.output`` (before dropout), those of the stack under ``decoder``, ``logits``.
    """

    part: str | None = "decoder"

    def decode(
        self,
        target_ids: Int[ndarray, "B T"],
        memory: Float[ndarray, "B S d_model"],
        source_ids: Int[ndarray, "B S"] | None = None,
        target_mask: Bool[ndarray, "B T"] | None = None,
        source_mask: Bool[ndarray, "B S"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
    ) -> Float[ndarray, "B T V"]:
        """Return the logits, given the memory. Arguments and errors as in ``Transformer``.

        Source ids or source mask mark the padding of the memory; where both are given, the mask counts.
        """
        memory, source_mask = self._take_memory(memory, source_ids, source_mask)
        target_ids, target_mask = self._take("target", target_ids, target_mask)
        check_same_batch(memory.shape, target_ids.shape)
        return self._decode(target_ids, memory, target_mask, source_mask, tap, rng)

    __call__ = decode

    @UNDERFLOW
    def _decode(self, target_ids, memory, target_mask, source_mask, tap=no_tap, rng=None):
        """Return the logits of ids, memory and masks that have been checked."""
        tap = checked(tap)
        x = self.target_position(self.target_embedding(target_ids))  # [B, T, d_model]
        if self.target_embedding_norm is not None:
            x = self.target_embedding_norm(x)
        x = self.dropout(tap("target_embedding.output", x), rng, tap, "target_embedding.output")
        self_mask = causal_mask(x.shape[1]) & target_mask[:, None, None, :]  # [B, 1, T, T]
        cross_mask = source_mask[:, None, None, :]  # [B, 1, 1, S]
        x = self.decoder(x, memory, self_mask, cross_mask, within(tap, "decoder"), rng)
        return tap("logits", self.output_proj(x))

    def init_cache(
        self,
        source_ids: Int[ndarray, "B S"] | None,
        capacity: int,
        beam_size: int = 1,
        source_mask: Bool[ndarray, "B S"] | None = None,
        memory: Float[ndarray, "B S d_model"] | None = None,
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
        capacity = check_positions("capacity", capacity, self.config.max_positions)
        beam_size = check_integer("beam_size", beam_size, minimum=1)
        memory, source_mask = self._take_memory_for_cache(memory, source_ids, source_mask)
        positions = self.target_position.vectors(capacity).astype(memory.dtype)  # [capacity, d_model]
        return self.decoder.init_cache(memory, source_mask[:, None, None, :], positions, beam_size)

    @UNDERFLOW
    def decode_step(
        self, target_ids: Int[ndarray, " R"] | Int[ndarray, "R L"], cache: DecoderCache, tap: Tap = no_tap
    ) -> tuple[Float[ndarray, "R V"] | Float[ndarray, "R L V"], DecoderCache]:
        """Return the logits of the token after each of the next target positions, as ``decode`` returns them.

        Args:
            target_ids: The token at the next position of each hypothesis [R], or the tokens at several positions
                [R, L], such as a prefix. Hypotheses of one sentence are side by side.
            cache: From ``init_cache`` or the last step. The step writes into it.
            tap: Receives each named intermediate and returns the value to continue with.

        Returns:
            The logits, [R, V] or [R, L, V], and the cache for the next step.

        Raises:
            TypeError: If the ids are not integers.
            ValueError: If ids are outside the vocabulary, don't match the hypotheses, or exceed the cache's capacity.
        """
        ids = np.asarray(target_ids)
        is_one = ids.ndim < 2
        ids = to_ids("target_ids", ids[None] if is_one else ids, self.config.target_vocab_size, None)
        ids = ids.T if is_one else ids  # [R, L]
        check_next_ids(ids.shape[:1], cache.length, cache.self_mask.shape)
        check_room(cache.length, ids.shape[1], cache.self_mask.shape[3])
        tap, n = checked(tap), cache.length + np.arange(ids.shape[1])
        cache.self_mask[:, 0, 0, n] = (ids != self.config.pad_id) | (n == 0)  # as in target_padding_mask
        x = self.target_embedding(ids) + cache.positions[n]  # [R, L, d_model]
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

    def __call__(  # type: ignore[override]  # of both parts
        self,
        source_ids: Int[ndarray, "B S"],
        target_ids: Int[ndarray, "B T"],
        source_mask: Bool[ndarray, "B S"] | None = None,
        target_mask: Bool[ndarray, "B T"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
    ) -> Float[ndarray, "B T V"]:
        """Return the logits of the token after each target position.

        Args:
            source_ids: The source sentences, padded with ``config.pad_id``.
            target_ids: The target sentences so far, starting with ``config.bos_id``, padded likewise.
            source_mask: True where a source position holds a token. None derives it from the ids.
            target_mask: True where a target position holds a token. None derives it from the ids.
            tap: Receives each named intermediate and returns the value to go on with.
            rng: Draws the dropout in training; None is inference.

        Raises:
            TypeError: Ids that are not integers, or a mask that is not boolean.
            ValueError: Ids or masks of the wrong shape, ids outside the vocabulary, or too many positions.
        """
        source_ids, source_mask = self._take("source", source_ids, source_mask)
        target_ids, target_mask = self._take("target", target_ids, target_mask)
        check_same_batch(source_ids.shape, target_ids.shape)
        memory = self._encode(source_ids, source_mask, tap, rng)
        return self._decode(target_ids, memory, target_mask, source_mask, tap, rng)

    def _take_memory_for_cache(self, memory, ids, mask):
        """Return the memory and the mask of its source, checked; a memory of None is computed from the source."""
        if memory is None:
            memory = self.encode(ids, mask)
        return self._take_memory(memory, ids, mask)


load_transformer = Transformer.from_file
