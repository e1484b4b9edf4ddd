"""What the whole model, the encoder alone and the decoder alone share: construction, weights and input checks."""

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
from transformer_jax.embedding import LearnedPosition, OutputProjection, SinusoidalPosition, TokenEmbedding
from transformer_jax.encoder import EncoderStack
from transformer_jax.fast import accelerate, same_keys
from transformer_jax.layers import Dropout, LayerNorm
from transformer_jax.masks import padding_mask, target_padding_mask
from transformer_jax.runtime import PRECISIONS, as_array, to_device, to_dtype, to_ids, to_mask, to_memory, to_rngs
from transformer_jax.weights import get_weights, set_weights
from transformer_spec.checks import check_choice, check_given, check_next_ids, check_room, check_type
from transformer_spec.config import TransformerConfig
from transformer_spec.files import load_weights


class Part(nnx.Module):
    """A Transformer, or its encoder or its decoder alone, whose parameters have the same names.

    Attributes:
        part: ``encoder``, ``decoder``, or None for both. Either alone has a copy of its own of a table that both share.
    """

    part: str | None = None

    def __init__(self, config: TransformerConfig, dtype: Any = "float32", *, fast: bool = True, rngs: Any) -> None:
        check_type("config", config, TransformerConfig)
        dtype, rngs = to_dtype(dtype), to_rngs(rngs)
        if dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise RuntimeError("float64 is off in JAX: switch it on by jax.config.update('jax_enable_x64', True)")
        position = LearnedPosition if config.position_encoding == "learned" else SinusoidalPosition
        tied = config.tie_embeddings == "all"
        self.config = config
        self.precision: str | None = None  # of its matrix products; None is that of the process
        if self.part != "decoder" or tied:
            self.source_embedding = TokenEmbedding(config.source_vocab_size, config, dtype, rngs=rngs)
        if self.part != "decoder":
            self.source_position = position(config, dtype, rngs=rngs)
            self.source_embedding_norm = LayerNorm(config, dtype, rngs=rngs) if config.embedding_norm else None
            self.encoder = EncoderStack(config, dtype, rngs=rngs)
        if self.part != "encoder":
            self.target_embedding = (
                self.source_embedding if tied else TokenEmbedding(config.target_vocab_size, config, dtype, rngs=rngs)
            )
            self.target_position = position(config, dtype, rngs=rngs)
            self.target_embedding_norm = LayerNorm(config, dtype, rngs=rngs) if config.embedding_norm else None
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
        """Build a model in inference mode with a copy of the given weights.

        Args:
            config: The config of the weights.
            weights: One array per canonical name, of any floating-point dtype. A part ignores the others' weights.
            dtype: The dtype of the parameters, such as ``jnp.bfloat16`` or its name. Layers compute in the dtype of
                their parameters, also after the state of the model is cast.
            device: A ``jax.Device``, or ``cpu``, ``gpu`` or ``tpu``. None lets JAX move the arrays.
            precision: The precision of this model's matmuls, ``highest`` or ``fast`` (see ``set_precision``). None uses
                the process's.
            fast: True computes with ``fast.py``, which agrees with the formulas up to rounding. False computes each
                formula as it is written.
            rngs: The random state of dropout: an ``nnx.Rngs``, a key or a seed. Without it, train mode raises Flax's
                error. A ``Trainer`` has its own seed.

        Raises:
            TypeError: If a weight is not of a floating-point dtype, or config or rngs is of a wrong type.
            ValueError: If the weights don't match the config, or dtype, device or precision is unknown.
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
        if device is not None:  # bind the arrays to it
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
        """Build a model in inference mode from a weight file; arguments and errors as in ``from_weights``."""
        return cls.from_weights(*load_weights(path), dtype, device, precision, fast=fast, rngs=rngs)

    def export_weights(self) -> dict[str, ndarray]:
        """Return a copy of every parameter under its canonical name, in the model's dtype.

        The update of an ``nnx.LoRALinear`` is added to the matrix of its layer.

        Raises:
            ValueError: If a different layer replaces one of this package, or a trainable parameter has no such name.
        """
        return get_weights(self)

    @property
    def device(self) -> jax.Device | None:
        """Where the parameters are bound to be; None where JAX is free to move them, or several devices hold them."""
        table = (self.target_embedding if self.part == "decoder" else self.source_embedding).embedding.get_value()
        if isinstance(table, jax.core.Tracer) or not isinstance(table, Array) or not table.committed:
            return None
        first, *others = table.devices()
        return None if others else first

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
        embedding = self.target_embedding
        dtype = embedding.dtype or embedding.embedding.dtype  # the first is set only if precision is mixed
        return to_memory(memory, (*mask.shape, self.config.d_model), np.dtype(dtype).name), mask

    _take_memory_for_cache = _take_memory  # the whole model overrides it: it can compute the memory

    def _take_next(self, ids, cache):
        """Return the ids of the next target positions [R, L], checked."""
        ids = as_array("target_ids", ids)
        is_one = ids.ndim < 2
        ids = to_ids("target_ids", ids[None] if is_one else ids, self.config.target_vocab_size, None)
        ids = ids.T if is_one else ids
        length = None if isinstance(cache.length, jax.core.Tracer) else int(cache.length)
        check_next_ids(ids.shape[:1], length, cache.self_mask.shape)
        check_room(length, ids.shape[1], cache.self_mask.shape[3])
        return ids
