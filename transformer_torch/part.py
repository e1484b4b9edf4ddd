"""What the whole model, the encoder alone and the decoder alone share: construction, weights and input checks."""

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
from transformer_torch.embedding import LearnedPosition, OutputProjection, SinusoidalPosition, TokenEmbedding
from transformer_torch.encoder import EncoderStack
from transformer_torch.fast import accelerate
from transformer_torch.layers import Dropout, LayerNorm, initialize
from transformer_torch.masks import padding_mask, target_padding_mask
from transformer_torch.runtime import set_precision, to_device, to_dtype, to_ids, to_mask, to_memory
from transformer_torch.weights import get_weights, set_weights


class Part(nn.Module):
    """A Transformer, or its encoder or its decoder alone, whose parameters have the same names.

    Attributes:
        part: ``encoder``, ``decoder``, or None for both. Either alone has a copy of its own of a table that both share.
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
        position = LearnedPosition if config.position_encoding == "learned" else SinusoidalPosition
        tied, dtype = config.tie_embeddings == "all", to_dtype(dtype)
        self.config, self.fast = config, fast
        with nullcontext() if device is None else to_device(device):
            if self.part != "decoder" or tied:
                self.source_embedding = TokenEmbedding(config.source_vocab_size, config, dtype)
            if self.part != "decoder":
                self.source_position = position(config, dtype)
                self.source_embedding_norm = LayerNorm(config, dtype) if config.embedding_norm else None
                self.encoder = EncoderStack(config, dtype)
            if self.part != "encoder":
                if not tied:
                    own = TokenEmbedding(config.target_vocab_size, config, dtype)
                    self.target_embedding = own  # type: ignore[misc]
                self.target_position = position(config, dtype)
                self.target_embedding_norm = LayerNorm(config, dtype) if config.embedding_norm else None
                self.decoder = DecoderStack(config, dtype)
                self.output_proj = OutputProjection(config, self.target_embedding, dtype)
            self.dropout = Dropout(config.dropout.embedding)
            if fast:
                accelerate(self)

    @property
    def target_embedding(self) -> Any:
        """Embedding of target tokens; if tied with that of source tokens, the same module, which is registered once."""
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
        """Build a model in inference mode that has a copy of the given weights.

        Args:
            config: The model that the weights belong to.
            weights: One array per canonical name, of any floating-point dtype. A part doesn't read those of the other.
            dtype: Dtype of parameters and computation, such as ``torch.float32`` or its name.
            device: Such as ``torch.device("cuda:1")`` or its name. None is PyTorch's default device.
            precision: ``highest`` or ``fast``, for the whole process (see ``set_precision``). None doesn't change it.
            fast: True computes with ``fast.py``, which agrees with the formulas up to rounding. False computes each
                formula as it is written.

        Raises:
            TypeError: If a weight is not of a floating-point dtype.
            ValueError: If the weights don't match the config, or dtype, device or precision is unknown.
            RuntimeError: If the device is not visible.
        """
        place = to_device(device)
        if precision is not None:
            set_precision(precision)
        with torch.device("meta"):  # shapes only: no time is spent on initial values
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
        """Build a model in inference mode from a weight file; arguments and errors as in ``from_weights``."""
        return cls.from_weights(*load_weights(path), dtype, device, precision, fast=fast)

    def export_weights(self) -> dict[str, ndarray]:
        """Return a copy of every parameter under its canonical name, in the model's dtype.

        Raises:
            ValueError: If a layer was replaced by one that doesn't compute with its weight only, such as an adapter.
        """
        return get_weights(self)

    def reset_parameters(self) -> None:
        """Draw initial values for all parameters, as the constructor does."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                initialize(module)
            elif module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return (self.target_embedding if self.part == "decoder" else self.source_embedding).weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return (self.target_embedding if self.part == "decoder" else self.source_embedding).weight.dtype

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
        return to_memory(memory, shape, self.dtype, self.device), mask

    _take_memory_for_cache = _take_memory  # the whole model overrides it: it can compute the memory
