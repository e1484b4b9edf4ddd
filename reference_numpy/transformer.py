"""The Transformer (Vaswani et al., 2017, Figure 1).

Axes: B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.decoder import DecoderCache
from reference_numpy.functional import UNDERFLOW
from reference_numpy.masks import causal_mask
from reference_numpy.part import Part
from reference_numpy.runtime import to_ids
from transformer_spec.checks import (
    check_capacity,
    check_integer,
    check_next_ids,
    check_positions,
    check_same_batch,
    to_array,
)
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, checked, no_tap, within


class Encoder(Part):
    """The encoder of a Transformer, including the source embedding (left half of Figure 1).

    It maps source tokens to the encoder memory: one vector per source position. The matrices of a new model are zero
    until you set weights. Use ``from_weights`` to create a model with given weights.

    Args:
        config: Model configuration.
        dtype: Dtype of the parameters and of the computation: float32 or float64, in any form that ``np.dtype``
            accepts.
        fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
            results up to rounding.

    Taps:
        source_embedding.output: Sum of embedding and positional encoding, before dropout.
        encoder: Prefix of the encoder stack's taps.
    """

    part: str | None = "encoder"

    def encode(
        self,
        source_ids: Int[ndarray, "B S"],
        source_mask: Bool[ndarray, "B S"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
    ) -> Float[ndarray, "B S d_model"]:
        """Return the encoder memory: one vector per source position.

        Args:
            source_ids: Token IDs of the source sequences, padded with ``config.pad_id``.
            source_mask: True for source positions that contain a token, False for padding. If None, it is derived from
                ``source_ids``.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            rng: Random generator for dropout. If None, dropout is disabled (inference).

        Raises:
            TypeError: If the IDs are not integers, or the mask is not boolean.
            ValueError: If the IDs or the mask have the wrong shape, an ID is outside the vocabulary, or there are more
                source positions than ``config.max_positions``.
        """
        source_ids, source_mask = self._take("source", source_ids, source_mask)
        return self._encode(source_ids, source_mask, tap, rng)

    __call__ = encode

    @UNDERFLOW
    def _encode(self, source_ids, source_mask, tap=no_tap, rng=None):
        """Return the encoder memory. The caller has checked the IDs and the mask."""
        tap = checked(tap)
        x = self.source_position(self.source_embedding(source_ids))  # [B, S, d_model]
        if self.source_embedding_norm is not None:
            x = self.source_embedding_norm(x)
        x = self.dropout(tap("source_embedding.output", x), rng, tap, "source_embedding.output")
        return self.encoder(x, source_mask[:, None, None, :], within(tap, "encoder"), rng)


class Decoder(Part):
    """The decoder of a Transformer, including target embedding and output projection (right half of Figure 1).

    At every target position, it computes the logits of the next token from the encoder memory and the target tokens up
    to this position. The matrices of a new model are zero until you set weights. Use ``from_weights`` to create a model
    with given weights.

    Args:
        config: Model configuration.
        dtype: Dtype of the parameters and of the computation: float32 or float64, in any form that ``np.dtype``
            accepts.
        fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
            results up to rounding.

    Taps:
        target_embedding.output: Sum of embedding and positional encoding, before dropout.
        decoder: Prefix of the decoder stack's taps.
        logits: Logits of the next tokens.
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
        """Return the logits of the token after each target position, given the encoder memory.

        ``source_ids`` or ``source_mask`` must specify the memory's padding. If you pass both, ``source_mask`` is used.

        Args:
            target_ids: Token IDs that the decoder reads: ``config.bos_id`` and the target tokens so far, padded with
                ``config.pad_id``.
            memory: Encoder memory, as returned by ``encode``.
            source_ids: Token IDs of the source sequences, padded with ``config.pad_id``. If None, ``source_mask`` is
                required.
            target_mask: True for target positions that contain a token, False for padding. If None, it is derived from
                ``target_ids``.
            source_mask: True for source positions that contain a token, False for padding. If None, it is derived from
                ``source_ids``.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            rng: Random generator for dropout. If None, dropout is disabled (inference).

        Raises:
            TypeError: If the IDs are not integers, a mask is not boolean, or the memory has a different dtype than the
                model.
            ValueError: If the IDs, the masks, or the memory have the wrong shape, an ID is outside the vocabulary,
                there are more target positions than ``config.max_positions``, or neither ``source_ids`` nor
                ``source_mask`` is given.
        """
        memory, source_mask = self._take_memory(memory, source_ids, source_mask)
        target_ids, target_mask = self._take("target", target_ids, target_mask)
        check_same_batch(memory.shape, target_ids.shape)
        return self._decode(target_ids, memory, target_mask, source_mask, tap, rng)

    __call__ = decode

    @UNDERFLOW
    def _decode(self, target_ids, memory, target_mask, source_mask, tap=no_tap, rng=None):
        """Return the logits. The caller has checked the IDs, the memory, and the masks."""
        tap = checked(tap)
        x = self.target_position(self.target_embedding(target_ids))  # [B, T, d_model]
        if self.target_embedding_norm is not None:
            x = self.target_embedding_norm(x)
        x = self.dropout(tap("target_embedding.output", x), rng, tap, "target_embedding.output")
        self_mask = causal_mask(x.shape[1]) & target_mask[:, None, None, :]  # [B, 1, T, T]
        cross_mask = source_mask[:, None, None, :]  # [B, 1, 1, S]
        x = self.decoder(x, memory, self_mask, cross_mask, within(tap, "decoder"), rng)
        if self.config.scale_logits:  # not in the paper; T5
            x = x * self.config.d_model**-0.5
        return tap("logits", self.output_proj(x))

    def init_cache(
        self,
        source_ids: Int[ndarray, "B S"] | None,
        capacity: int,
        beam_size: int = 1,
        source_mask: Bool[ndarray, "B S"] | None = None,
        memory: Float[ndarray, "B S d_model"] | None = None,
    ) -> DecoderCache:
        """Return a cache for ``decode_step``, which decodes the target step by step.

        Args:
            source_ids: Token IDs of the source sequences, padded with ``config.pad_id``. If None, ``memory`` and
                ``source_mask`` are required.
            capacity: Maximum number of target positions, including BOS.
            beam_size: Number of hypotheses per source sequence.
            source_mask: True for source positions that contain a token, False for padding. If None, it is derived from
                ``source_ids``.
            memory: Encoder memory, as returned by ``encode``. If None, a ``Transformer`` computes the memory from
                ``source_ids``, and a ``Decoder`` raises an error.

        Raises:
            TypeError: If IDs or sizes are not integers, the mask is not boolean, or the memory has a different dtype
                than the model.
            ValueError: If the IDs, the mask, or the memory have the wrong shape, an ID is outside the vocabulary,
                ``capacity`` exceeds ``config.max_positions``, or a required argument is missing.
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
        """For each of the next target positions, return the logits of the following token. Also return the cache.

        ``decode`` computes the same logits from all target tokens at once.

        Args:
            target_ids: Token at the next position of each hypothesis [R], or tokens at several positions [R, L], such
                as a prefix. Hypotheses of the same sequence are in adjacent rows.
            cache: Cache from ``init_cache`` or from the previous step. It is updated in place.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.

        Returns:
            The logits, [R, V] or [R, L, V], and the same cache, which you pass to the next step.

        Raises:
            TypeError: If the IDs are not integers.
            ValueError: If an ID is outside the vocabulary, the number of rows doesn't match the number of hypotheses,
                or the new positions exceed the capacity of the cache.
        """
        ids = to_array("target_ids", target_ids)
        is_one = ids.ndim == 1
        ids = to_ids("target_ids", ids[None] if is_one else ids, self.config.target_vocab_size, None)
        ids = ids.T if is_one else ids  # [R, L]
        check_next_ids(ids.shape[:1], cache.length, cache.self_mask.shape)
        check_capacity(cache.length, ids.shape[1], cache.self_mask.shape[3])
        tap, n = checked(tap), cache.length + np.arange(ids.shape[1])
        cache.self_mask[:, 0, 0, n] = (ids != self.config.pad_id) | (n == 0)  # the same rule as in target_padding_mask
        x = self.target_embedding(ids) + cache.positions[n]  # [R, L, d_model]
        if self.target_embedding_norm is not None:
            x = self.target_embedding_norm(x)
        x = self.decoder.step(tap("target_embedding.output", x), cache, within(tap, "decoder"))
        if self.config.scale_logits:  # not in the paper; T5
            x = x * self.config.d_model**-0.5
        logits = tap("logits", self.output_proj(x))
        cache.length += ids.shape[1]
        return (logits[:, 0] if is_one else logits), cache


class Transformer(Encoder, Decoder):
    """The full Transformer: encoder, decoder, and output projection (Figure 1).

    At every target position, it computes the logits of the next token from the source tokens and the target tokens up
    to this position. The matrices of a new model are zero until you set weights. Use ``from_weights`` to create a model
    with given weights.

    Args:
        config: Model configuration.
        dtype: Dtype of the parameters and of the computation: float32 or float64, in any form that ``np.dtype``
            accepts.
        fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
            results up to rounding.

    Taps:
        source_embedding.output, target_embedding.output: Sums of embedding and positional encoding, before dropout.
        encoder, decoder: Prefixes of the two stacks' taps.
        logits: Logits of the next tokens.
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
            source_ids: Token IDs of the source sequences, padded with ``config.pad_id``.
            target_ids: Token IDs that the decoder reads: ``config.bos_id`` and the target tokens so far, padded with
                ``config.pad_id``.
            source_mask: True for source positions that contain a token, False for padding. If None, it is derived from
                ``source_ids``.
            target_mask: True for target positions that contain a token, False for padding. If None, it is derived from
                ``target_ids``.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            rng: Random generator for dropout. If None, dropout is disabled (inference).

        Raises:
            TypeError: If the IDs are not integers, or a mask is not boolean.
            ValueError: If the IDs or the masks have the wrong shape, an ID is outside the vocabulary, or there are more
                positions than ``config.max_positions``.
        """
        source_ids, source_mask = self._take("source", source_ids, source_mask)
        target_ids, target_mask = self._take("target", target_ids, target_mask)
        check_same_batch(source_ids.shape, target_ids.shape)
        memory = self._encode(source_ids, source_mask, tap, rng)
        return self._decode(target_ids, memory, target_mask, source_mask, tap, rng)

    def _take_memory_for_cache(self, memory, ids, mask):
        """Check and return the encoder memory and the source mask. If no memory is given, compute it."""
        if memory is None:
            memory = self.encode(ids, mask)
        return self._take_memory(memory, ids, mask)


def check_model(model: Any) -> None:
    """Raise a TypeError unless the model is a full Transformer, from this package or from a copy of this package."""
    if getattr(model, "part", "") is not None:
        raise TypeError(f"model must be a Transformer: got {type(model).__name__}")


load_transformer = Transformer.from_file
