"""What the whole model, the encoder alone and the decoder alone share: construction, weights and input checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy import ndarray
from torch import nn

from transformer_spec.checks import check_given, check_type
from transformer_spec.config import TransformerConfig
from transformer_spec.files import load_weights
from transformer_torch.decoder import DecoderStack
from transformer_torch.embedding import LearnedPosition, OutputProjection, SinusoidalPosition, TokenEmbedding
from transformer_torch.encoder import EncoderStack
from transformer_torch.fast import accelerate
from transformer_torch.layers import Dropout, LayerNorm
from transformer_torch.masks import padding_mask, target_padding_mask
from transformer_torch.runtime import check_placement, dtype_name, set_precision, to_device, to_ids, to_mask, to_memory
from transformer_torch.weights import get_weights, set_weights


class Part(nn.Module):
    """A Transformer, or its encoder or its decoder alone, whose parameters have the same names.

    Attributes:
        part: ``encoder``, ``decoder``, or None for both. Either alone has a copy of its own of a table that both share.
    """

    part: str | None = None

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, fast: bool = True) -> None:
        super().__init__()
        check_type("config", config, TransformerConfig)
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
        self.fast = fast
        if fast:
            accelerate(self)

    @classmethod
    def from_weights(
        cls,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        dtype: str = "float32",
        device: str | None = None,
        precision: str | None = None,
        *,
        fast: bool = True,
    ) -> Self:
        """Build a model in inference mode that holds a copy of the given weights.

        Args:
            config: What the weights are weights of.
            weights: One array per canonical name, of any floating-point dtype. A part leaves the others unread.
            dtype: The dtype of parameters and computation. In JAX, float64 is switched on for the whole process.
            device: ``cpu`` or ``gpu``. None leaves the place to the framework.
            precision: ``highest`` or ``fast``, for the whole process (see ``set_precision``); in JAX, for this model.
                None leaves it as it is.
            fast: True computes with ``fast.py``, which agrees with the formulas up to rounding. False computes each
                formula as it is written.

        Raises:
            TypeError: A weight is not of a floating-point dtype.
            ValueError: The weights are not those of the config, or dtype, device or precision is unknown.
            RuntimeError: The device is not visible.
        """
        check_placement(dtype, device)
        if precision is not None:
            set_precision(precision)
        with torch.device("meta"):  # shapes only: no time is spent on initial values
            model = cls(config, dtype, fast=fast)
        place = to_device(device)
        model._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device=place))  # to_empty would import SymPy
        set_weights(model, weights)
        return model.eval()

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        dtype: str = "float32",
        device: str | None = None,
        precision: str | None = None,
        *,
        fast: bool = True,
    ) -> Self:
        """Build a model in inference mode from a weight file; arguments and errors as in ``from_weights``."""
        return cls.from_weights(*load_weights(path), dtype, device, precision, fast=fast)

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

    def _take_memory(self, memory, ids, mask):
        """Return the memory and the mask of its source, checked."""
        check_given(memory, ids, mask)
        if mask is None:
            _, mask = self._take("source", ids, None)
        else:
            mask = to_mask("source_mask", mask, np.shape(memory)[:2], self.device)
        shape = (*mask.shape, self.config.d_model)
        return to_memory(memory, shape, dtype_name(self.target_embedding.table), self.device), mask

    _take_memory_for_cache = _take_memory  # the whole model overrides it: it can compute the memory


def _complete(model, state_dict, prefix, *_):
    """Let a state dict that has a tied table once have it in both places."""
    table, weight = prefix + "target_embedding.table", prefix + "output_proj.weight"
    if model.config.tie_embeddings != "none" and model.part != "encoder" and table in state_dict:
        state_dict.setdefault(weight, state_dict[table])


def _settle(model, incompatible_keys):
    """Let a tied table stay one parameter where ``assign=True`` made new parameters."""
    model._tie()
