"""Base class of the full model, the encoder, and the decoder: construction, weights, and input checks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy import ndarray
from torch import nn

from transformer_spec.checks import check_given, check_type
from transformer_spec.config import TransformerConfig
from transformer_spec.files import load_weights
from transformer_torch.decoder import DecoderStack
from transformer_torch.embedding import POSITIONS, OutputProjection, TokenEmbedding
from transformer_torch.encoder import EncoderStack
from transformer_torch.fast import accelerate
from transformer_torch.layers import Dropout, initialize, make_norm
from transformer_torch.masks import padding_mask, target_padding_mask
from transformer_torch.runtime import set_precision, to_device, to_dtype, to_ids, to_mask, to_memory
from transformer_torch.weights import check_tie, get_weights, set_weights


class Part(nn.Module):
    """Base class of ``Transformer``, ``Encoder``, and ``Decoder``, which use the same parameter names.

    If all embeddings are tied, an ``Encoder`` and a ``Decoder`` each have their own copy of the shared embedding
    matrix.

    Args:
        config: Model configuration.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name. One of float64, float32, and bfloat16.
        device: Device, such as ``torch.device("cuda:1")`` or its name. If None, PyTorch's default device is used.
        fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
            results up to rounding.

    Attributes:
        part: ``encoder``, ``decoder``, or None for the full model.
    """

    part: str | None = None

    def __init__(
        self,
        config: TransformerConfig,
        dtype: torch.dtype | str = "float32",
        device: torch.device | str | None = None,
        *,
        fast: bool = True,
    ) -> None:
        super().__init__()
        check_type("config", config, TransformerConfig)
        position, shared = POSITIONS[config.position_encoding], config.shares_embedding
        dtype = to_dtype(dtype)
        self.config, self.fast = config, fast
        with nullcontext() if device is None else to_device(device):
            if self.part != "decoder" or shared:
                self.source_embedding = TokenEmbedding(config.source_vocab_size, config, dtype)
            if self.part != "decoder":
                self.source_position = position(config, dtype)
                self.source_embedding_norm = make_norm(config, dtype) if config.embedding_norm else None
                self.encoder = EncoderStack(config, dtype)
            if self.part != "encoder":
                if not shared:
                    own = TokenEmbedding(config.target_vocab_size, config, dtype)
                    self.target_embedding = own  # type: ignore[misc]
                self.target_position = position(config, dtype)
                self.target_embedding_norm = make_norm(config, dtype) if config.embedding_norm else None
                self.decoder = DecoderStack(config, dtype)
                self.output_proj = OutputProjection(config, self.target_embedding, dtype)
            self.dropout = Dropout(config.dropout.embedding)
            self.register_state_dict_pre_hook(check_tie)
            if fast:
                accelerate(self)

    @property
    def target_embedding(self) -> Any:
        """Embedding of the target tokens.

        If both embeddings are tied, this is ``source_embedding``, which is registered only once.
        """
        own = self._modules.get("target_embedding")
        return self.source_embedding if own is None else own

    @classmethod
    def from_weights(
        cls,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        dtype: torch.dtype | str = "float32",
        device: torch.device | str | None = None,
        precision: str | None = None,
        *,
        fast: bool = True,
    ) -> Self:
        """Create a model in inference mode with a copy of the given weights.

        Args:
            config: Configuration of the model to which the weights belong.
            weights: One array per canonical parameter name, in any floating-point dtype. An ``Encoder`` ignores decoder
                parameters, and a ``Decoder`` ignores encoder parameters.
            dtype: Dtype of the parameters, as a ``torch.dtype`` or its name. One of float64, float32, and bfloat16.
            device: Device, such as ``torch.device("cuda:1")`` or its name. If None, PyTorch's default device is used.
            precision: Precision of float32 matmuls in the whole process, ``highest`` or ``fast`` (see
                ``set_precision``). If None, the current precision is kept.
            fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
                results up to rounding.

        Raises:
            TypeError: If a weight doesn't have a floating-point dtype, or ``config`` is not a ``TransformerConfig``.
            ValueError: If the weights don't match the config or overflow the model's dtype, or if ``dtype``,
                ``device``, or ``precision`` is unknown.
            RuntimeError: If the device is not visible.
        """
        place = to_device(device)
        if precision is not None:
            set_precision(precision)
        with torch.device("meta"):  # skip the initialization
            model = cls(config, dtype, fast=fast)
        model._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device=place))  # to_empty would import SymPy
        set_weights(model, weights)
        return model.eval()

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        dtype: torch.dtype | str = "float32",
        device: torch.device | str | None = None,
        precision: str | None = None,
        *,
        fast: bool = True,
    ) -> Self:
        """Create a model in inference mode from a weight file or a checkpoint.

        Args:
            path: A ``.safetensors`` file written by ``save_weights`` or ``save_checkpoint``.
            dtype: Dtype of the parameters, as a ``torch.dtype`` or its name. One of float64, float32, and bfloat16.
            device: Device, such as ``torch.device("cuda:1")`` or its name. If None, PyTorch's default device is used.
            precision: Precision of float32 matmuls in the whole process, ``highest`` or ``fast`` (see
                ``set_precision``). If None, the current precision is kept.
            fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
                results up to rounding.

        Raises:
            OSError: If the file can't be read.
            ValueError: If the file is not a valid weight file, its weights overflow the model's dtype, or ``dtype``,
                ``device``, or ``precision`` is unknown.
            RuntimeError: If the device is not visible.
        """
        return cls.from_weights(*load_weights(path), dtype, device, precision, fast=fast)

    def export_weights(self) -> dict[str, ndarray]:
        """Return copies of all parameters, keyed by canonical name. The copies have the model's dtype.

        Raises:
            ValueError: If a layer was replaced with a quantized layer, an adapter, or another layer that has additional
                parameters, or if a hook computes a weight before each forward pass.
        """
        return get_weights(self)

    def reset_parameters(self) -> None:
        """Reinitialize all parameters, as the constructor does."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                initialize(module)
            elif module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._first_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self._first_weight.dtype

    @property
    def _first_weight(self):
        """The embedding matrix, or the first parameter if the embedding was replaced with a module without a matrix."""
        weight = getattr(self.target_embedding if self.part == "decoder" else self.source_embedding, "weight", None)
        return next(self.parameters()) if weight is None else weight

    def _take(self, side, ids, mask):
        """Check and return the IDs and the mask of ``source`` or ``target``. If no mask is given, compute the mask."""
        config = self.config
        ids = to_ids(f"{side}_ids", ids, getattr(config, f"{side}_vocab_size"), config.max_positions, self.device)
        if mask is not None:
            return ids, to_mask(f"{side}_mask", mask, ids.shape, self.device)
        return ids, (padding_mask if side == "source" else target_padding_mask)(ids, config.pad_id)

    def _take_memory(self, memory, ids, mask):
        """Check and return the encoder memory and the source mask."""
        check_given(memory, ids, mask)
        if mask is None:
            _, mask = self._take("source", ids, None)
        else:
            mask = to_mask("source_mask", mask, np.shape(memory)[:2], self.device)
        shape = (*mask.shape, self.config.d_model)
        return to_memory(memory, shape, self.dtype, self.device), mask

    _take_memory_for_cache = _take_memory  # Transformer overrides this method to compute the memory
