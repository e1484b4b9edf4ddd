"""What the whole model, the encoder alone and the decoder alone share: construction, weights and input checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
from numpy import ndarray
from numpy.typing import DTypeLike

from reference_numpy.decoder import DecoderStack
from reference_numpy.embedding import LearnedPosition, OutputProjection, SinusoidalPosition, TokenEmbedding
from reference_numpy.encoder import EncoderStack
from reference_numpy.fast import accelerate
from reference_numpy.layers import Dropout, LayerNorm
from reference_numpy.masks import padding_mask, target_padding_mask
from reference_numpy.runtime import check_placement, set_precision, to_ids, to_mask, to_memory
from reference_numpy.weights import get_weights, set_weights
from transformer_spec.checks import check_given, check_type
from transformer_spec.config import DEPTHS, SIZES, TransformerConfig
from transformer_spec.files import load_weights
from transformer_spec.names import find, parameter_shapes


class Part:
    """A Transformer, or its encoder or its decoder alone, whose parameters have the same names.

    The matrices of a new model are zero until ``set_weights``. ``from_weights`` builds and sets.

    Attributes:
        part: ``encoder``, ``decoder``, or None for both. Either alone has a copy of its own of a table that both share.
    """

    part: str | None = None

    def __init__(self, config: TransformerConfig, dtype: DTypeLike = "float32", *, fast: bool = True) -> None:
        check_type("config", config, TransformerConfig)
        dtype = check_placement(dtype, None)
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
        self.fast = fast
        if fast:
            accelerate(self)

    @classmethod
    def from_weights(
        cls,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        dtype: DTypeLike = "float32",
        device: str | None = None,
        precision: str | None = None,
        *,
        fast: bool = True,
    ) -> Self:
        """Build a model in inference mode that holds a copy of the given weights.

        Args:
            config: What the weights are weights of.
            weights: One array per canonical name, of any floating-point dtype. A part leaves the others unread.
            dtype: float64 or float32, for parameters and computation; anything that ``np.dtype`` accepts.
            device: ``cpu`` or None: there is no other.
            precision: ``highest`` or ``fast``; on a CPU, both compute in full float32.
            fast: True computes with ``fast.py``, which agrees with the formulas up to rounding. False computes each
                formula as it is written.

        Raises:
            TypeError: A weight is not of a floating-point dtype.
            ValueError: The weights are not those of the config, or dtype, device or precision is unknown.
        """
        check_placement(dtype, device)
        if precision is not None:
            set_precision(precision)
        model = cls(config, dtype, fast=fast)
        set_weights(model, weights)
        return model

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        dtype: DTypeLike = "float32",
        device: str | None = None,
        precision: str | None = None,
        *,
        fast: bool = True,
    ) -> Self:
        """Build a model in inference mode from a weight file; arguments and errors as in ``from_weights``."""
        return cls.from_weights(*load_weights(path), dtype, device, precision, fast=fast)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self.config, name)}" for name in (*SIZES, *DEPTHS))
        parameters = [find(self, name) for name in parameter_shapes(self.config, self.part)]
        count = sum(parameter.size for parameter in parameters)
        return f"{type(self).__name__}({sizes}): {count:,} parameters in {parameters[0].dtype}"

    def export_weights(self) -> dict[str, ndarray]:
        """Return a copy of every parameter under its canonical name, in the model's dtype."""
        return get_weights(self)

    def _take(self, side, ids, mask):
        """Return the ids of ``source`` or ``target`` and their mask, checked; a mask of None follows from the ids."""
        config = self.config
        ids = to_ids(f"{side}_ids", ids, getattr(config, f"{side}_vocab_size"), config.max_positions)
        if mask is not None:
            return ids, to_mask(f"{side}_mask", mask, ids.shape)
        return ids, (padding_mask if side == "source" else target_padding_mask)(ids, config.pad_id)

    def _take_memory(self, memory, ids, mask):
        """Return the memory and the mask of its source, checked."""
        check_given(memory, ids, mask)
        if mask is None:
            _, mask = self._take("source", ids, None)
        else:
            mask = to_mask("source_mask", mask, np.shape(memory)[:2])
        shape = (*mask.shape, self.config.d_model)
        return to_memory(memory, shape, self.target_embedding.table.dtype.name), mask

    _take_memory_for_cache = _take_memory  # the whole model overrides it: it can compute the memory
