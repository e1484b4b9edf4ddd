"""Base class of the full model, the encoder, and the decoder: construction, weights, and input checks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf
from numpy import ndarray

from transformer_spec.checks import check_capacity, check_given, check_next_ids, check_same_batch
from transformer_spec.config import TransformerConfig
from transformer_spec.files import load_weights
from transformer_tf.block import Configured, loading
from transformer_tf.decoder import DecoderStack
from transformer_tf.embedding import POSITIONS, OutputProjection, TokenEmbedding
from transformer_tf.encoder import EncoderStack
from transformer_tf.fast import accelerate
from transformer_tf.layers import Dropout, make_norm
from transformer_tf.masks import padding_mask, target_padding_mask
from transformer_tf.runtime import (
    as_placed,
    placed,
    set_precision,
    to_device,
    to_ids,
    to_mask,
    to_memory,
    to_policy,
)
from transformer_tf.weights import get_weights, set_weights


class Part(Configured, keras.Model):
    """Base class of ``Transformer``, ``Encoder``, and ``Decoder``, which use the same parameter names.

    If all embeddings are tied, an ``Encoder`` and a ``Decoder`` each have their own copy of the shared embedding
    matrix.

    Args:
        config: Model configuration.
        dtype: Dtype policy, by name or as an object. If None, the global Keras policy is used.
        fast: If True, use the optimized code in ``fast.py``. If False, use the unoptimized code. Both give the same
            results up to rounding.
        kwargs: Additional arguments of ``keras.Model``, such as ``name``.

    Attributes:
        part: ``encoder``, ``decoder``, or None for the full model.
    """

    part: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check that a subclass of ``Transformer`` accepts ``source_ids`` and ``target_ids``.

        Raises:
            TypeError: If ``call`` has different parameters.
        """
        super().__init_subclass__(**kwargs)
        signature = inspect.signature(cls.call)
        takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in signature.parameters.values())
        if cls.part is None and not takes_any and not {"source_ids", "target_ids"} <= signature.parameters.keys():
            raise TypeError(
                f"{cls.__name__}.call must have the parameters source_ids and target_ids: got {signature}; use the "
                "parameters of Transformer.call"
            )

    def __init__(
        self, config: TransformerConfig, dtype: str | None = None, *, fast: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(dtype=dtype, **kwargs)
        position, shared = POSITIONS[config.position_encoding], config.shares_embedding
        norm = make_norm if config.embedding_norm else lambda *_, **__: None
        self.config = config
        self.device: str | None = None  # device on which calls run; if None, the caller's scope is used
        if self.part != "decoder" or shared:
            self.source_embedding = TokenEmbedding(config.source_vocab_size, config, dtype, name="source_embedding")
        if self.part != "decoder":
            self.source_position = position(config, dtype, name="source_position")
            self.source_embedding_norm = norm(config, dtype, name="source_embedding_norm")
            self.encoder = EncoderStack(config, dtype, name="encoder")
        if self.part != "encoder":
            self.target_embedding = (
                self.source_embedding
                if shared
                else TokenEmbedding(config.target_vocab_size, config, dtype, name="target_embedding")
            )
            self.target_position = position(config, dtype, name="target_position")
            self.target_embedding_norm = norm(config, dtype, name="target_embedding_norm")
            self.decoder = DecoderStack(config, dtype, name="decoder")
            self.output_proj = OutputProjection(config, self.target_embedding, dtype, name="output_proj")
        self.dropout = Dropout(config.dropout.embedding, dtype=dtype, name="dropout")
        self.built = True
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
    ) -> Self:
        """Create a model in inference mode with a copy of the given weights.

        Args:
            config: Configuration of the model to which the weights belong.
            weights: One array per canonical parameter name, in any floating-point dtype. An ``Encoder`` ignores decoder
                parameters, and a ``Decoder`` ignores encoder parameters.
            dtype: Dtype policy: ``float64``, ``float32``, ``bfloat16`` or ``mixed_bfloat16``, by name or as an object.
            device: ``cpu``, ``gpu``, or a TensorFlow device name, such as ``/GPU:1``. If None, the caller's
                ``tf.device`` scope is used.
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
        policy, device = to_policy(dtype), to_device(device)
        if precision is not None:
            set_precision(precision)
        with placed(device), loading() as scope:
            model = cls(config, dtype=policy, fast=fast)
        for variable in model.variables:
            if (value := scope.get_current_value(variable)) is not None:  # assigned in a subclass's constructor
                variable.assign(value)
        model.device = device
        set_weights(model, weights)
        return model

    @as_placed
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the model. IDs may be lists, and Keras may pass all inputs in one list, tuple, or dict."""
        options = {name: value for name, value in options.items() if value is not None}
        if len(args) == 1 and _is_structure(args[0]) and "target_ids" not in options:
            inputs = args[0]
            return self(**inputs, **options) if isinstance(inputs, Mapping) else self(*inputs, **options)
        if self.part is not None:
            args = tuple(np.asarray(x) if isinstance(x, list | tuple) and not _is_structure(x) else x for x in args)
        elif not any(map(keras.backend.is_keras_tensor, (*args, *options.values()))):
            # Check the inputs here. If `call` raised an error, Keras would append text to the error message.
            args, options = (), self._take_both(*args, **options)
        outputs = super().__call__(*args, **options)
        if self.part == "encoder" and keras.backend.is_keras_tensor(outputs):
            given = {**dict(zip(("source_ids", "source_mask"), args, strict=False)), **options}
            if "source_mask" in given:  # Keras passes only the IDs to `compute_mask`
                outputs._keras_mask = given["source_mask"]
        return outputs

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        dtype: Any = "float32",
        device: Any = None,
        precision: str | None = None,
        *,
        fast: bool = True,
    ) -> Self:
        """Create a model in inference mode from a weight file or a checkpoint.

        Args:
            path: A ``.safetensors`` file written by ``save_weights`` or ``save_checkpoint``.
            dtype: Dtype policy: ``float64``, ``float32``, ``bfloat16`` or ``mixed_bfloat16``, by name or as an object.
            device: ``cpu``, ``gpu``, or a TensorFlow device name, such as ``/GPU:1``. If None, the caller's
                ``tf.device`` scope is used.
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

    @property
    def _default_save_signature(self):
        """Return the function that ``tf.saved_model.save`` exports. It takes token IDs. For a decoder, return None."""
        names = {None: ["source_ids", "target_ids"], "encoder": ["source_ids"], "decoder": []}[self.part]
        signature = [tf.TensorSpec([None, None], tf.int32, name) for name in names]
        return tf.function(lambda *ids: self(*ids), signature, autograph=False) if names else None

    def load_own_variables(self, store: Any) -> None:
        """Load variables from a Keras file.

        Args:
            store: Store from which Keras loads the variables.

        Raises:
            ValueError: If the file has more layers than the model. Keras would silently skip the additional layers.
        """
        super().load_own_variables(store)
        for stack in (layer for layer in self.layers if isinstance(layer, EncoderStack | DecoderStack)):
            path = f"{getattr(store, '_h5_entry_path', None) or ''}/{stack.name}/layers"
            count = len(getattr(store, "h5_file", {}).get(path, ()))
            if count > len(stack.layers):
                raise ValueError(f"{stack.name} must have {count} layers, as in the file: got {len(stack.layers)}")

    def export_weights(self) -> dict[str, ndarray]:
        """Return copies of all parameters, keyed by canonical name. The copies have the model's dtype.

        If LoRA is enabled for a layer, the LoRA update is added to the kernel.

        Raises:
            ValueError: If a layer was replaced or quantized, or a trainable parameter has no canonical name.
        """
        return get_weights(self)

    def _take(self, side, ids, mask):
        """Check and return the IDs and the mask of ``source`` or ``target``. If no mask is given, compute the mask."""
        config = self.config
        ids = to_ids(f"{side}_ids", ids, getattr(config, f"{side}_vocab_size"), config.max_positions)
        if mask is not None:
            return ids, to_mask(f"{side}_mask", mask, tuple(ids.shape))
        return ids, (padding_mask if side == "source" else target_padding_mask)(ids, config.pad_id)

    def _take_memory(self, memory, ids, mask):
        """Check and return the encoder memory and the source mask."""
        check_given(memory, ids, mask)
        if mask is None:
            _, mask = self._take("source", ids, None)
        else:
            mask = to_mask("source_mask", mask, tuple(np.shape(memory))[:2])
        shape = (*mask.shape, self.config.d_model)
        return to_memory(memory, shape, self.compute_dtype), mask

    _take_memory_for_cache = _take_memory  # Transformer overrides this method to compute the memory

    def _take_both(self, source_ids=..., target_ids=..., source_mask=None, target_mask=None, **options):
        """Check and return the arguments of a call to the full model, keyed by name."""
        if source_ids is ... or target_ids is ...:
            missing = "source_ids" if source_ids is ... else "target_ids"
            raise TypeError(
                f"{missing} must be given; call model(source_ids, target_ids) or model([source_ids, target_ids])"
            )
        source_ids, source_mask = self._take("source", source_ids, source_mask)
        target_ids, target_mask = self._take("target", target_ids, target_mask)
        check_same_batch(tuple(source_ids.shape), tuple(target_ids.shape))
        ids = {"source_ids": source_ids, "target_ids": target_ids}
        return {**ids, "source_mask": source_mask, "target_mask": target_mask, **options}

    def _take_next(self, ids, cache):
        """Check and return the IDs of each hypothesis at the next target positions [R, L]."""
        ids = ids if tf.is_tensor(ids) else np.asarray(ids)
        is_one = len(ids.shape) == 1
        ids = to_ids("target_ids", ids[None] if is_one else ids, self.config.target_vocab_size, None)
        ids = tf.transpose(ids) if is_one else ids
        length = tf.get_static_value(cache.length)  # returns None in a traced function
        length = None if length is None else int(length)
        check_next_ids(tuple(ids.shape)[:1], length, tuple(cache.self_mask.shape))
        check_capacity(length, ids.shape[1], cache.self_mask.shape[3])
        return ids


def _is_structure(inputs):
    """Return whether an argument is a list, tuple, or dict of all inputs of a call. Otherwise, it is a single input."""
    if isinstance(inputs, tuple | list):
        return any(len(np.shape(x)) == 2 for x in inputs)
    return isinstance(inputs, Mapping)
