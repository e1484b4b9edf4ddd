"""Base class of the full model, the encoder, and the decoder: construction, weights, and input checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
from numpy import ndarray
from numpy.typing import DTypeLike

from reference_numpy.decoder import DecoderStack
from reference_numpy.embedding import POSITIONS, OutputProjection, TokenEmbedding
from reference_numpy.encoder import EncoderStack
from reference_numpy.fast import accelerate
from reference_numpy.layers import Dropout, make_norm
from reference_numpy.masks import padding_mask, target_padding_mask
from reference_numpy.runtime import check_placement, set_precision, to_ids, to_mask, to_memory
from reference_numpy.weights import get_weights, set_weights
from transformer_spec.checks import check_given, check_type
from transformer_spec.config import DEPTHS, SIZES, TransformerConfig
from transformer_spec.files import load_weights
from transformer_spec.names import find, parameter_shapes


class Part:
    """Base class of ``Transformer``, ``Encoder``, and ``Decoder``, which use the same parameter names.

    If both embeddings are tied, an ``Encoder`` and a ``Decoder`` each have their own copy of the shared embedding
    matrix.

    Args:
        config: Model configuration.
        dtype: Dtype of the parameters and of the computation: float32 or float64, in any form that ``np.dtype``
            accepts.
        fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
            results up to rounding.

    Attributes:
        part: ``encoder``, ``decoder``, or None for the full model.
    """

    part: str | None = None

    def __init__(self, config: TransformerConfig, dtype: DTypeLike = "float32", *, fast: bool = True) -> None:
        check_type("config", config, TransformerConfig)
        dtype = check_placement(dtype, None)
        position = POSITIONS[config.position_encoding]
        shared = config.shares_embedding
        self.config = config
        if self.part != "decoder" or shared:
            self.source_embedding = TokenEmbedding(config.source_vocab_size, config, dtype)
        if self.part != "decoder":
            self.source_position = position(config, dtype)
            self.source_embedding_norm = make_norm(config, dtype) if config.embedding_norm else None
            self.encoder = EncoderStack(config, dtype)
        if self.part != "encoder":
            self.target_embedding = (
                self.source_embedding if shared else TokenEmbedding(config.target_vocab_size, config, dtype)
            )
            self.target_position = position(config, dtype)
            self.target_embedding_norm = make_norm(config, dtype) if config.embedding_norm else None
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
        """Create a model in inference mode with a copy of the given weights.

        Args:
            config: Configuration of the model to which the weights belong.
            weights: One array per canonical parameter name, in any floating-point dtype. An ``Encoder`` ignores decoder
                parameters, and a ``Decoder`` ignores encoder parameters.
            dtype: Dtype of the parameters and of the computation: float32 or float64, in any form that ``np.dtype``
                accepts.
            device: ``cpu`` or None. Both have the same effect.
            precision: ``highest`` or ``fast``. NumPy computes in full float32 with both settings.
            fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
                results up to rounding.

        Raises:
            TypeError: If a weight doesn't have a floating-point dtype, or ``config`` is not a ``TransformerConfig``.
            ValueError: If the weights don't match the config or overflow the model's dtype, or if ``dtype``,
                ``device``, or ``precision`` is unknown.
        """
        check_placement(dtype, device)
        if precision is not None:
            set_precision(precision)
        model = cls(config, dtype=dtype, fast=fast)
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
        """Create a model in inference mode from a weight file or a checkpoint.

        Args:
            path: A ``.safetensors`` file written by ``save_weights`` or ``save_checkpoint``.
            dtype: Dtype of the parameters and of the computation: float32 or float64, in any form that ``np.dtype``
                accepts.
            device: ``cpu`` or None. Both have the same effect.
            precision: ``highest`` or ``fast``. NumPy computes in full float32 with both settings.
            fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
                results up to rounding.

        Raises:
            OSError: If the file can't be read.
            ValueError: If the file is not a valid weight file, its weights overflow the model's dtype, or ``dtype``,
                ``device``, or ``precision`` is unknown.
        """
        return cls.from_weights(*load_weights(path), dtype, device, precision, fast=fast)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self.config, name)}" for name in (*SIZES, *DEPTHS))
        parameters = [find(self, name) for name in parameter_shapes(self.config, self.part)]
        count = sum(parameter.size for parameter in parameters)
        return f"{type(self).__name__}({sizes}): {count:,} parameters in {parameters[0].dtype}"

    def export_weights(self) -> dict[str, ndarray]:
        """Return copies of all parameters, keyed by canonical name. The copies have the model's dtype.

        Raises:
            TypeError: If a parameter is not an array.
            ValueError: If the number of layers doesn't match the config, a parameter has no canonical name, or two
                parameters use the same memory.
        """
        return get_weights(self)

    def _take(self, side, ids, mask):
        """Check and return the IDs and the mask of ``source`` or ``target``. If no mask is given, compute the mask."""
        config = self.config
        ids = to_ids(f"{side}_ids", ids, getattr(config, f"{side}_vocab_size"), config.max_positions)
        if mask is not None:
            return ids, to_mask(f"{side}_mask", mask, ids.shape)
        return ids, (padding_mask if side == "source" else target_padding_mask)(ids, config.pad_id)

    def _take_memory(self, memory, ids, mask):
        """Check and return the encoder memory and the source mask."""
        check_given(memory, ids, mask)
        if mask is None:
            _, mask = self._take("source", ids, None)
        else:
            mask = to_mask("source_mask", mask, np.shape(memory)[:2])
        shape = (*mask.shape, self.config.d_model)
        return to_memory(memory, shape, self.target_embedding.table.dtype.name), mask

    _take_memory_for_cache = _take_memory  # Transformer overrides this method to compute the memory
