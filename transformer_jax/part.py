"""Base class of the full model, the encoder, and the decoder: construction, weights, and input checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from flax import nnx
from jax import Array
from numpy import ndarray

from transformer_jax.decoder import DecoderStack
from transformer_jax.embedding import POSITIONS, OutputProjection, TokenEmbedding
from transformer_jax.encoder import EncoderStack
from transformer_jax.fast import accelerate, same_keys
from transformer_jax.layers import Dropout, make_norm
from transformer_jax.masks import padding_mask, target_padding_mask
from transformer_jax.runtime import (
    PRECISIONS,
    as_array,
    check_float64,
    to_device,
    to_dtype,
    to_ids,
    to_mask,
    to_memory,
    to_rngs,
)
from transformer_jax.weights import check_loaded, get_weights, set_weights
from transformer_spec.checks import check_capacity, check_choice, check_given, check_next_ids, check_type
from transformer_spec.config import TransformerConfig
from transformer_spec.files import load_weights


class Part(nnx.Module):
    """Base class of ``Transformer``, ``Encoder``, and ``Decoder``, which use the same parameter names.

    If all embeddings are tied, an ``Encoder`` and a ``Decoder`` each have their own copy of the shared embedding
    matrix.

    Args:
        config: Model configuration.
        dtype: Dtype of the parameters, such as ``jnp.bfloat16`` or its name. One of float64, float32, and bfloat16.
            Layers compute in the dtype of their parameters, even if you cast the model's state later.
        fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
            results up to rounding.
        rngs: Random state for the initial values and dropout, as an ``nnx.Rngs``, a key, or a seed.

    Attributes:
        part: ``encoder``, ``decoder``, or None for the full model.
    """

    part: str | None = None

    def __init__(self, config: TransformerConfig, dtype: Any = "float32", *, fast: bool = True, rngs: Any) -> None:
        check_type("config", config, TransformerConfig)
        dtype, rngs = to_dtype(dtype), to_rngs(rngs)
        check_float64(dtype)
        position, shared = POSITIONS[config.position_encoding], config.shares_embedding
        self.config = config
        self.precision: str | None = None  # precision of matmuls; if None, the process's setting is used
        if self.part != "decoder" or shared:
            self.source_embedding = TokenEmbedding(config.source_vocab_size, config, dtype, rngs=rngs)
        if self.part != "decoder":
            self.source_position = position(config, dtype, rngs=rngs)
            self.source_embedding_norm = make_norm(config, dtype, rngs=rngs) if config.embedding_norm else None
            self.encoder = EncoderStack(config, dtype, rngs=rngs)
        if self.part != "encoder":
            self.target_embedding = (
                self.source_embedding if shared else TokenEmbedding(config.target_vocab_size, config, dtype, rngs=rngs)
            )
            self.target_position = position(config, dtype, rngs=rngs)
            self.target_embedding_norm = make_norm(config, dtype, rngs=rngs) if config.embedding_norm else None
            self.decoder = DecoderStack(config, dtype, rngs=rngs)
            self.output_proj = OutputProjection(config, self.target_embedding, dtype, rngs=rngs)
        self.dropout = Dropout(config.dropout.embedding, rngs=rngs)
        self.fast = fast
        if fast:
            accelerate(self)

    @classmethod
    def from_weights(
        cls,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        dtype: Any = "float32",
        device: Any = None,
        precision: str | None = None,
        *,
        fast: bool = True,
        rngs: Any = None,
    ) -> Self:
        """Create a model in inference mode with a copy of the given weights.

        Args:
            config: Configuration of the model to which the weights belong.
            weights: One array per canonical parameter name, in any floating-point dtype. An ``Encoder`` ignores decoder
                parameters, and a ``Decoder`` ignores encoder parameters.
            dtype: Dtype of the parameters, such as ``jnp.bfloat16`` or its name. One of float64, float32, and bfloat16.
                Layers compute in the dtype of their parameters, even if you cast the model's state later.
            device: A ``jax.Device``, or ``cpu``, ``gpu``, or ``tpu``. If None, JAX chooses the device and can move the
                arrays.
            precision: Precision of this model's matmuls, ``highest`` or ``fast`` (see ``set_precision``). If None, the
                setting of the process is used.
            fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
                results up to rounding.
            rngs: Random state of dropout, as an ``nnx.Rngs``, a key, or a seed. If None, Flax raises an error when the
                model is called in train mode. A ``Trainer`` uses its own seed instead.

        Raises:
            TypeError: If a weight doesn't have a floating-point dtype, or ``config`` or ``rngs`` has the wrong type.
            ValueError: If the weights don't match the config or overflow the model's dtype, if ``dtype``, ``device``,
                or ``precision`` is unknown, or if a subclass adds variables, because loading doesn't initialize them.
            RuntimeError: If the device is not visible, or the dtype is float64 and ``jax_enable_x64`` is off.
        """
        dtype, place = to_dtype(dtype), to_device(device)
        stream = None if rngs is None else to_rngs(rngs).dropout
        if precision is not None:
            check_choice("precision", precision, PRECISIONS)
        with jax.default_device(place):
            model = nnx.eval_shape(lambda: cls(config, dtype, fast=fast, rngs=same_keys()))
            set_weights(model, weights)
            for _, module in nnx.iter_modules(model):
                if isinstance(module, Dropout):
                    module.rngs = nnx.data(stream and stream.fork())
            check_loaded(model)
        if device is not None:  # commit the arrays to the device
            nnx.update(model, jax.device_put(nnx.state(model), place))
        model.precision = precision
        model.eval()
        return model

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        dtype: Any = "float32",
        device: Any = None,
        precision: str | None = None,
        *,
        fast: bool = True,
        rngs: Any = None,
    ) -> Self:
        """Create a model in inference mode from a weight file or a checkpoint.

        Args:
            path: A ``.safetensors`` file written by ``save_weights`` or ``save_checkpoint``.
            dtype: Dtype of the parameters, such as ``jnp.bfloat16`` or its name. One of float64, float32, and bfloat16.
                Layers compute in the dtype of their parameters, even if you cast the model's state later.
            device: A ``jax.Device``, or ``cpu``, ``gpu``, or ``tpu``. If None, JAX chooses the device and can move the
                arrays.
            precision: Precision of this model's matmuls, ``highest`` or ``fast`` (see ``set_precision``). If None, the
                setting of the process is used.
            fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
                results up to rounding.
            rngs: Random state of dropout, as an ``nnx.Rngs``, a key, or a seed. If None, Flax raises an error when the
                model is called in train mode. A ``Trainer`` uses its own seed instead.

        Raises:
            OSError: If the file can't be read.
            TypeError: If ``rngs`` has the wrong type.
            ValueError: If the file is not a valid weight file, its weights overflow the model's dtype, or ``dtype``,
                ``device``, or ``precision`` is unknown.
            RuntimeError: If the device is not visible, or the dtype is float64 and ``jax_enable_x64`` is off.
        """
        return cls.from_weights(*load_weights(path), dtype, device, precision, fast=fast, rngs=rngs)

    def export_weights(self) -> dict[str, ndarray]:
        """Return copies of all parameters, keyed by canonical name. The copies have the model's dtype.

        If a layer was replaced with an ``nnx.LoRALinear``, the LoRA update is added to the kernel.

        Raises:
            ValueError: If a layer of this package was replaced with a different type of layer, if the forward pass uses
                a variable that has no canonical name, or if the parameters have only shapes and no values.
        """
        return get_weights(self)

    @property
    def device(self) -> jax.Device | None:
        """Device to which the parameters are committed. None if they are uncommitted or on several devices."""
        table = (self.target_embedding if self.part == "decoder" else self.source_embedding).embedding.get_value()
        if isinstance(table, jax.core.Tracer) or not isinstance(table, Array) or not table.committed:
            return None
        first, *others = table.devices()
        return None if others else first

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
        embedding = self.target_embedding
        dtype = embedding.dtype or embedding.embedding.dtype  # dtype is set only for mixed precision
        return to_memory(memory, (*mask.shape, self.config.d_model), np.dtype(dtype).name), mask

    _take_memory_for_cache = _take_memory  # Transformer overrides this method to compute the memory

    def _take_next(self, ids, cache):
        """Check and return the IDs of each hypothesis at the next target positions [R, L]."""
        ids = as_array("target_ids", ids)
        is_one = ids.ndim == 1
        ids = to_ids("target_ids", ids[None] if is_one else ids, self.config.target_vocab_size, None)
        ids = ids.T if is_one else ids
        length = None if isinstance(cache.length, jax.core.Tracer) else int(cache.length)
        check_next_ids(ids.shape[:1], length, cache.self_mask.shape)
        check_capacity(length, ids.shape[1], cache.self_mask.shape[3])
        return ids
