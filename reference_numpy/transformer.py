"""The Transformer (Vaswani et al., 2017, Figure 1).

B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray

from reference_numpy.checks import check_integer, check_next_ids, check_positions, check_same_batch
from reference_numpy.config import TransformerConfig
from reference_numpy.decoder import Decoder, DecoderCache
from reference_numpy.embedding import LearnedPosition, OutputProjection, SinusoidalPosition, TokenEmbedding
from reference_numpy.encoder import Encoder
from reference_numpy.files import load_weights
from reference_numpy.layers import Dropout, LayerNorm
from reference_numpy.masks import causal_mask, padding_mask, target_padding_mask
from reference_numpy.runtime import check_placement, set_precision, to_ids, to_mask, to_memory
from reference_numpy.taps import Tap, no_tap, within
from reference_numpy.weights import get_weights, set_weights

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Transformer:
    """Map source tokens and the target tokens so far to the logits of each next target token.

    Taps:
        ``source_embedding.output`` (what enters the stack, before dropout), those of the encoder,
        ``target_embedding.output``, those of the decoder, ``logits``. A Recorder passed as ``tap`` returns any of
        them beside the logits: every decoder layer's output for auxiliary losses (``decoder.layers.*.output``), or
        the attention weights (``**.weights``).
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        position = LearnedPosition if config.position_encoding == "learned" else SinusoidalPosition
        self.config = config
        self.source_embedding = TokenEmbedding(config.source_vocab_size, config, dtype)
        self.target_embedding = (
            self.source_embedding
            if config.tie_embeddings == "all"
            else TokenEmbedding(config.target_vocab_size, config, dtype)
        )
        self.source_position = position(config, dtype)
        self.target_position = position(config, dtype)
        self.source_embedding_norm = LayerNorm(config, dtype) if config.embedding_norm else None
        self.target_embedding_norm = LayerNorm(config, dtype) if config.embedding_norm else None
        self.encoder = Encoder(config, dtype)
        self.decoder = Decoder(config, dtype)
        self.output_proj = OutputProjection(config, self.target_embedding, dtype)
        self.dropout = Dropout(config.dropout.embedding)

    @classmethod
    def from_weights(
        cls,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        dtype: str = "float32",
        device: str | None = None,
        precision: str | None = None,
    ) -> Transformer:
        """Build a model in inference mode that holds a copy of the given weights.

        Args:
            config: What the weights are weights of.
            weights: One array per canonical name, of any floating-point dtype.
            dtype: The dtype of parameters and computation. In JAX, float64 is switched on for the whole process.
            device: ``cpu`` or ``gpu``. None leaves the place to the framework.
            precision: ``highest`` or ``fast``, for the whole process (see ``set_precision``); in JAX, for this model.
                None leaves it as it is.

        Raises:
            TypeError: A weight is not of a floating-point dtype.
            ValueError: The weights are not those of the config, or dtype, device or precision is unknown.
            RuntimeError: The device is not visible.
        """
        check_placement(dtype, device)
        if precision is not None:
            set_precision(precision)
        model = cls(config, dtype)
        set_weights(model, weights)
        return model

    def export_weights(self) -> dict[str, ndarray]:
        """Return a copy of every parameter under its canonical name, in the model's dtype."""
        return get_weights(self)

    def __call__(
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
        source_ids, source_mask = self._take_source(source_ids, source_mask)
        target_ids, target_mask = self._take_target(target_ids, target_mask)
        check_same_batch(source_ids.shape, target_ids.shape)
        memory = self.encode(source_ids, source_mask, tap, rng)
        return self.decode(target_ids, memory, source_ids, target_mask, source_mask, tap, rng)

    def encode(
        self,
        source_ids: Int[ndarray, "B S"],
        source_mask: Bool[ndarray, "B S"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
    ) -> Float[ndarray, "B S d_model"]:
        """Return the memory: one vector per source position. Arguments and errors as in the call."""
        source_ids, source_mask = self._take_source(source_ids, source_mask)
        x = self.source_position(self.source_embedding(source_ids))  # [B, S, d_model]
        if self.source_embedding_norm is not None:
            x = self.source_embedding_norm(x)
        x = self.dropout(tap("source_embedding.output", x), rng, tap, "source_embedding.output")
        return self.encoder(x, source_mask[:, None, None, :], within(tap, "encoder"), rng)

    def decode(
        self,
        target_ids: Int[ndarray, "B T"],
        memory: Float[ndarray, "B S d_model"],
        source_ids: Int[ndarray, "B S"],
        target_mask: Bool[ndarray, "B T"] | None = None,
        source_mask: Bool[ndarray, "B S"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
    ) -> Float[ndarray, "B T V"]:
        """Return the logits, given the memory of the same source ids. Arguments and errors as in the call."""
        source_ids, source_mask = self._take_source(source_ids, source_mask)
        target_ids, target_mask = self._take_target(target_ids, target_mask)
        check_same_batch(source_ids.shape, target_ids.shape)
        memory_shape = (*source_ids.shape, self.config.d_model)
        memory = to_memory(memory, memory_shape, self.source_embedding.table.dtype.name)
        x = self.target_position(self.target_embedding(target_ids))  # [B, T, d_model]
        if self.target_embedding_norm is not None:
            x = self.target_embedding_norm(x)
        x = self.dropout(tap("target_embedding.output", x), rng, tap, "target_embedding.output")
        self_mask = causal_mask(x.shape[1]) & target_mask[:, None, None, :]  # [B, 1, T, T]
        cross_mask = source_mask[:, None, None, :]  # [B, 1, 1, S]
        x = self.decoder(x, memory, self_mask, cross_mask, within(tap, "decoder"), rng)
        return self._logits(x, tap)

    def init_cache(
        self,
        source_ids: Int[ndarray, "B S"],
        capacity: int,
        beam_size: int = 1,
        source_mask: Bool[ndarray, "B S"] | None = None,
    ) -> DecoderCache:
        """Encode the source, and return what ``decode_step`` needs to decode one target position after another.

        Args:
            source_ids: The source sentences, padded with ``config.pad_id``.
            capacity: How many target positions there is room for, that of the start symbol included.
            beam_size: How many hypotheses of each sentence are decoded at a time.
            source_mask: True where a source position holds a token. None derives it from the ids.

        Raises:
            TypeError: Ids or sizes that are not integers, or a mask that is not boolean.
            ValueError: Ids or mask of the wrong shape, ids outside the vocabulary, or too many positions.
        """
        capacity = check_positions("capacity", capacity, self.config.max_positions)
        beam_size = check_integer("beam_size", beam_size, minimum=1)
        source_ids, source_mask = self._take_source(source_ids, source_mask)
        memory = self.encode(source_ids, source_mask)
        positions = self.target_position.vectors(capacity).astype(memory.dtype)  # [capacity, d_model]
        return self.decoder.init_cache(memory, source_mask[:, None, None, :], positions, beam_size)

    def decode_step(
        self, target_ids: Int[ndarray, " R"], cache: DecoderCache, tap: Tap = no_tap
    ) -> tuple[Float[ndarray, "R V"], DecoderCache]:
        """Return the logits of the token after the next target position, as ``decode`` has them there.

        Args:
            target_ids: The token at the next position of each hypothesis, those of one sentence side by side.
            cache: What came before. JAX and TensorFlow leave it as it is, NumPy and PyTorch write into it.
            tap: Receives each named intermediate and returns the value to go on with.

        Returns:
            The logits, and the cache to go on with.

        Raises:
            TypeError: Ids that are not integers.
            ValueError: Ids outside the vocabulary, not one for each hypothesis, or no room for another position.
        """
        target_ids = to_ids("target_ids", np.asarray(target_ids)[None], self.config.target_vocab_size, None)[0]
        check_next_ids(target_ids.shape, cache.length, cache.self_mask.shape)
        n = cache.length
        cache.self_mask[:, 0, 0, n] = (target_ids != self.config.pad_id) | (n == 0)  # as in target_padding_mask
        x = self.target_embedding(target_ids[:, None]) + cache.positions[n]  # [R, 1, d_model]
        if self.target_embedding_norm is not None:
            x = self.target_embedding_norm(x)
        x = self.decoder.step(tap("target_embedding.output", x), cache, within(tap, "decoder"))
        return self._logits(x, tap)[:, 0], cache

    def _take_source(self, ids, mask):
        config = self.config
        ids = to_ids("source_ids", ids, config.source_vocab_size, config.max_positions)
        if mask is None:
            return ids, padding_mask(ids, config.pad_id)
        return ids, to_mask("source_mask", mask, ids.shape)

    def _take_target(self, ids, mask):
        config = self.config
        ids = to_ids("target_ids", ids, config.target_vocab_size, config.max_positions)
        if mask is None:
            return ids, target_padding_mask(ids, config.pad_id)
        return ids, to_mask("target_mask", mask, ids.shape)

    def _logits(self, x, tap):
        return tap("logits", self.output_proj(x))


def load_transformer(
    path: str | Path, dtype: str = "float32", device: str | None = None, precision: str | None = None
) -> Transformer:
    """Build a model in inference mode from a weight file; arguments and errors as in ``from_weights``."""
    return Transformer.from_weights(*load_weights(path), dtype, device, precision)
