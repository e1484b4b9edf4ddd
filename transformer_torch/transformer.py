"""The Transformer (Vaswani et al., 2017, Figure 1).

B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn

from transformer_spec.checks import check_given, check_integer, check_next_ids, check_positions, check_same_batch
from transformer_spec.config import TransformerConfig
from transformer_spec.files import load_weights
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap, within
from transformer_torch.decoder import DecoderCache, DecoderStack
from transformer_torch.embedding import LearnedPosition, OutputProjection, SinusoidalPosition, TokenEmbedding
from transformer_torch.encoder import EncoderStack
from transformer_torch.layers import Dropout, LayerNorm
from transformer_torch.masks import causal_mask, padding_mask, target_padding_mask
from transformer_torch.runtime import check_placement, dtype_name, set_precision, to_device, to_ids, to_mask, to_memory
from transformer_torch.weights import get_weights, set_weights


class Part(nn.Module):
    """A Transformer, or its encoder or its decoder alone, whose parameters have the same names.

    Attributes:
        part: ``encoder``, ``decoder``, or None for both. Either alone has a copy of its own of a table that both share.
    """

    part: str | None = None

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        super().__init__()
        position = LearnedPosition if config.position_encoding == "learned" else SinusoidalPosition
        tied = config.tie_embeddings == "all"
        self.config = config
        if self.part != "decoder" or tied:
            self.source_embedding = TokenEmbedding(config.source_vocab_size, config, dtype)
        if self.part != "decoder":
            self.source_position = position(config, dtype)
            self.source_embedding_norm = LayerNorm(config, dtype) if config.embedding_norm else None
            self.encoder = EncoderStack(config, dtype)
        if self.part != "encoder":
            self.target_embedding = (
                self.source_embedding if tied else TokenEmbedding(config.target_vocab_size, config, dtype)
            )
            self.target_position = position(config, dtype)
            self.target_embedding_norm = LayerNorm(config, dtype) if config.embedding_norm else None
            self.decoder = DecoderStack(config, dtype)
            self.output_proj = OutputProjection(config, self.target_embedding, dtype)
        self.dropout = Dropout(config.dropout.embedding)
        self.register_load_state_dict_pre_hook(_complete)
        self.register_load_state_dict_post_hook(_settle)

    @classmethod
    def from_weights(
        cls,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        dtype: str = "float32",
        device: str | None = None,
        precision: str | None = None,
    ) -> Self:
        """Build a model in inference mode that holds a copy of the given weights.

        Args:
            config: What the weights are weights of.
            weights: One array per canonical name, of any floating-point dtype. A part leaves the others unread.
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
        with torch.device("meta"):  # shapes only: no time is spent on initial values
            model = cls(config, dtype)
        place = to_device(device)
        model._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device=place))  # to_empty would import SymPy
        set_weights(model, weights)
        return model.eval()

    def export_weights(self) -> dict[str, ndarray]:
        """Return a copy of every parameter under its canonical name, in the model's dtype."""
        return get_weights(self)

    def _apply(self, fn, recurse=True):
        """Let a tied table stay one parameter also where new parameters are made, as by ``to_empty``."""
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self):
        if self.config.tie_embeddings != "none" and self.part != "encoder":
            self.output_proj.weight = self.target_embedding.table

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return (self.target_embedding if self.part == "decoder" else self.source_embedding).table.device

    def _take(self, side, ids, mask):
        """Return the ids of ``source`` or ``target`` and their mask, checked; a mask of None follows from the ids."""
        config = self.config
        ids = to_ids(f"{side}_ids", ids, getattr(config, f"{side}_vocab_size"), config.max_positions, self.device)
        if mask is not None:
            return ids, to_mask(f"{side}_mask", mask, ids.shape, self.device)
        return ids, (padding_mask if side == "source" else target_padding_mask)(ids, config.pad_id)


class Encoder(Part):
    """Map source tokens to the memory: the left half of Figure 1, alone.

    Taps:
        ``source_embedding.output`` (what enters the stack, before dropout), those of the stack under ``encoder``.
    """

    part: str | None = "encoder"

    def encode(
        self,
        source_ids: Int[Tensor, "B S"],
        source_mask: Bool[Tensor, "B S"] | None = None,
        tap: Tap = no_tap,
    ) -> Float[Tensor, "B S d_model"]:
        """Return the memory: one vector per source position. Arguments and errors as in ``Transformer``."""
        source_ids, source_mask = self._take("source", source_ids, source_mask)
        x = self.source_position(self.source_embedding(source_ids))  # [B, S, d_model]
        if self.source_embedding_norm is not None:
            x = self.source_embedding_norm(x)
        x = self.dropout(tap("source_embedding.output", x))
        return self.encoder(x, source_mask[:, None, None, :], within(tap, "encoder"))

    forward = encode


class Decoder(Part):
    """Map target tokens and the memory to the logits of each next target token: the right half of Figure 1, alone.

    Taps:
        ``target_embedding.output`` (what enters the stack, before dropout), those of the stack under ``decoder``,
        ``logits``.
    """

    part: str | None = "decoder"

    def decode(
        self,
        target_ids: Int[Tensor, "B T"],
        memory: Float[Tensor, "B S d_model"],
        source_ids: Int[Tensor, "B S"] | None = None,
        target_mask: Bool[Tensor, "B T"] | None = None,
        source_mask: Bool[Tensor, "B S"] | None = None,
        tap: Tap = no_tap,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits, given the memory. Arguments and errors as in ``Transformer``.

        Source ids or source mask mark the padding of the memory; where both are given, the mask counts.
        """
        memory, source_mask = self._take_memory(memory, source_ids, source_mask)
        target_ids, target_mask = self._take("target", target_ids, target_mask)
        check_same_batch(memory.shape, target_ids.shape)
        x = self.target_position(self.target_embedding(target_ids))  # [B, T, d_model]
        if self.target_embedding_norm is not None:
            x = self.target_embedding_norm(x)
        x = self.dropout(tap("target_embedding.output", x))
        self_mask = causal_mask(x.shape[1], x.device) & target_mask[:, None, None, :]  # [B, 1, T, T]
        cross_mask = source_mask[:, None, None, :]  # [B, 1, 1, S]
        x = self.decoder(x, memory, self_mask, cross_mask, within(tap, "decoder"))
        return self._logits(x, tap)

    forward = decode

    @torch.no_grad()
    def init_cache(
        self,
        source_ids: Int[Tensor, "B S"] | None,
        capacity: int,
        beam_size: int = 1,
        source_mask: Bool[Tensor, "B S"] | None = None,
        memory: Float[Tensor, "B S d_model"] | None = None,
    ) -> DecoderCache:
        """Return what ``decode_step`` needs to decode one target position after another.

        Args:
            source_ids: The source sentences, padded with ``config.pad_id``; None where memory and mask are given.
            capacity: How many target positions there is room for, that of the start symbol included.
            beam_size: How many hypotheses of each sentence are decoded at a time.
            source_mask: True where a source position holds a token. None derives it from the ids.
            memory: What ``encode`` returns for the source. None computes it; a decoder alone has to be given it.

        Raises:
            TypeError: Ids or sizes that are not integers, a mask that is not boolean, or a memory of another dtype.
            ValueError: Ids, mask or memory of the wrong shape, ids outside the vocabulary, or too many positions.
        """
        capacity = check_positions("capacity", capacity, self.config.max_positions)
        beam_size = check_integer("beam_size", beam_size, minimum=1)
        if memory is None and isinstance(self, Encoder):
            source_ids, source_mask = self._take("source", source_ids, source_mask)
            memory = self.encode(source_ids, source_mask)
        memory, source_mask = self._take_memory(memory, source_ids, source_mask)
        positions = self.target_position.vectors(capacity).to(memory.dtype)  # [capacity, d_model]
        return self.decoder.init_cache(memory, source_mask[:, None, None, :], positions, beam_size)

    @torch.no_grad()
    def decode_step(
        self, target_ids: Int[Tensor, " R"], cache: DecoderCache, tap: Tap = no_tap
    ) -> tuple[Float[Tensor, "R V"], DecoderCache]:
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
        ids = target_ids if isinstance(target_ids, Tensor) else np.asarray(target_ids)
        target_ids = to_ids("target_ids", ids[None], self.config.target_vocab_size, None, self.device)[0]
        check_next_ids(target_ids.shape, cache.length, cache.self_mask.shape)
        n = cache.length
        cache.self_mask[:, 0, 0, n] = (target_ids != self.config.pad_id) | (n == 0)  # as in target_padding_mask
        x = self.target_embedding(target_ids[:, None]) + cache.positions[n]  # [R, 1, d_model]
        if self.target_embedding_norm is not None:
            x = self.target_embedding_norm(x)
        x = self.decoder.step(tap("target_embedding.output", x), cache, within(tap, "decoder"))
        return self._logits(x, tap)[:, 0], cache

    def _logits(self, x, tap):
        return tap("logits", self.output_proj(x))

    def _take_memory(self, memory, ids, mask):
        """Return the memory and the mask of its source, checked."""
        check_given(memory, ids, mask)
        if mask is None:
            _, mask = self._take("source", ids, None)
        else:
            mask = to_mask("source_mask", mask, np.shape(memory)[:2], self.device)
        shape = (*mask.shape, self.config.d_model)
        return to_memory(memory, shape, dtype_name(self.target_embedding.table), self.device), mask


class Transformer(Encoder, Decoder):
    """Map source tokens and the target tokens so far to the logits of each next target token.

    Taps:
        ``source_embedding.output`` (what enters the stack, before dropout), those of the encoder,
        ``target_embedding.output``, those of the decoder, ``logits``. A Recorder passed as ``tap`` returns any of
        them beside the logits: every decoder layer's output for auxiliary losses (``decoder.layers.*.output``), or
        the attention weights (``**.weights``).
    """

    part: str | None = None

    def forward(  # type: ignore[override]  # of both parts
        self,
        source_ids: Int[Tensor, "B S"],
        target_ids: Int[Tensor, "B T"],
        source_mask: Bool[Tensor, "B S"] | None = None,
        target_mask: Bool[Tensor, "B T"] | None = None,
        tap: Tap = no_tap,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits of the token after each target position.

        Args:
            source_ids: The source sentences, padded with ``config.pad_id``.
            target_ids: The target sentences so far, starting with ``config.bos_id``, padded likewise.
            source_mask: True where a source position holds a token. None derives it from the ids.
            target_mask: True where a target position holds a token. None derives it from the ids.
            tap: Receives each named intermediate and returns the value to go on with.

        Raises:
            TypeError: Ids that are not integers, or a mask that is not boolean.
            ValueError: Ids or masks of the wrong shape, ids outside the vocabulary, or too many positions.
        """
        source_ids, source_mask = self._take("source", source_ids, source_mask)
        target_ids, target_mask = self._take("target", target_ids, target_mask)
        check_same_batch(source_ids.shape, target_ids.shape)
        memory = self.encode(source_ids, source_mask, tap)
        return self.decode(target_ids, memory, source_ids, target_mask, source_mask, tap)


def _complete(model, state_dict, prefix, *_):
    """Let a state dict that has a tied table once have it in both places."""
    table, weight = prefix + "target_embedding.table", prefix + "output_proj.weight"
    if model.config.tie_embeddings != "none" and model.part != "encoder" and table in state_dict:
        state_dict.setdefault(weight, state_dict[table])


def _settle(model, incompatible_keys):
    """Let a tied table stay one parameter, and positions have values, where ``assign=True`` made new parameters."""
    model._tie()
    for position in model.modules():
        if isinstance(position, SinusoidalPosition) and position.table.device != model.device:
            position.to_empty(device=model.device).to(next(model.parameters()).dtype)


def load_transformer(
    path: str | Path, dtype: str = "float32", device: str | None = None, precision: str | None = None
) -> Transformer:
    """Build a model in inference mode from a weight file; arguments and errors as in ``from_weights``."""
    return Transformer.from_weights(*load_weights(path), dtype, device, precision)
