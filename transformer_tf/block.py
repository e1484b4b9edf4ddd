"""The base classes of all layers: Keras can save, copy and build them, and load them without initial values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.checks import check_attention_mask, check_type
from transformer_spec.config import TransformerConfig

_LOADING: ContextVar[bool] = ContextVar("loading", default=False)


@contextmanager
def loading() -> Iterator[None]:
    """Let a model be built whose parameters are loaded: they begin as zeros, and no number is drawn for them."""
    before = _LOADING.set(True)
    try:
        # Variables are created at its end. TensorFlow would take four times as long in the name scope of each layer.
        with keras.StatelessScope():
            yield
    finally:
        _LOADING.reset(before)


def initial(initializer: Any) -> Any:
    """Return the initializer of a parameter, or zeros while a model is loaded."""
    return "zeros" if _LOADING.get() else initializer


def attention_mask_for(memory: Any, attention_mask: Any = None, mask: Any = None) -> Any:
    """Return an attention mask that also excludes the padding which Keras' own mask of a memory marks.

    Args:
        memory: Tensor [B, M, d_model]. ``Embedding(mask_zero=True)`` attaches a mask to its output, for example.
        attention_mask: Boolean mask that broadcasts to [B, H, L, M], or None.
        mask: Boolean mask [B, M]. None uses the mask that Keras has attached to the memory.

    Raises:
        TypeError: If ``attention_mask`` is not boolean.
        ValueError: If ``mask`` does not have two axes, or ``attention_mask`` does not broadcast to the memory.
    """
    mask = getattr(memory, "_keras_mask", None) if mask is None else mask
    if mask is None:
        return attention_mask
    if len(mask.shape) != 2:
        raise ValueError(f"mask must have shape [batch, length]: got {tuple(mask.shape)}. Pass it as attention_mask")
    if attention_mask is None:
        return mask[:, None, None, :]
    check_attention_mask(
        tuple(attention_mask.shape), attention_mask.dtype.name, (mask.shape[0], None, None), (None, None, mask.shape[1])
    )
    return attention_mask & mask[:, None, None, :]


class Configured:
    """What Keras can save, copy and build again, by the arguments of its constructor."""

    _signature: ClassVar[inspect.Signature]  # of the constructor
    _given: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let Keras find the class by the names of its package and its own."""
        super().__init_subclass__(**kwargs)
        cls._signature = inspect.signature(cls.__init__)
        keras.saving.register_keras_serializable(cls.__module__.partition(".")[0])(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Keep the arguments, as Keras itself does where they are plain numbers.

        Raises:
            TypeError: If the config is not a ``TransformerConfig``.
            RuntimeError: If Keras computes with a different framework.
        """
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(f"transformer_tf needs Keras on TensorFlow: KERAS_BACKEND is {keras.backend.backend()}")
        layer = super().__new__(cls, *args, **kwargs)
        given = cls._signature.bind(layer, *args, **kwargs).arguments
        if "config" in given:
            check_type("config", given["config"], TransformerConfig)
        own = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
        vars(layer)["_given"] = {**own, **given.get("kwargs", {})}  # not by setattr, or Keras would save it
        return layer

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the layer and omit options that are None: ``training=None`` would hide the mode of the outer layer."""
        return super().__call__(*args, **{name: value for name, value in options.items() if value is not None})  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """Return what ``from_config`` needs to build the layer again: Keras saves it beside the weights."""
        given = {
            name: value.to_dict()
            if isinstance(value, TransformerConfig)
            else keras.saving.serialize_keras_object(value)
            for name, value in self._given.items()
        }
        return {**given, **keras.layers.Layer.get_config(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Build a layer from ``get_config``."""
        given = {name: keras.saving.deserialize_keras_object(value, custom_objects) for name, value in config.items()}
        if "config" in given:
            given["config"] = TransformerConfig.from_dict(given["config"])
        return cls(**given)


class Block(Configured, keras.layers.Layer):
    """A layer that is complete once constructed.

    Keras would otherwise run ``call`` on symbolic tensors at the first use to find the weights, and every tap would
    fire for them too.
    """

    def __init__(self, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.built = True
        self.supports_masking = True  # the output keeps Keras' mask of the first input

    def _trackable_children(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Let ``tf.train.Checkpoint`` find the layers of a stack: by itself it looks into none of Keras' lists."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(getattr(self, "layers", ()))}
        return {**super()._trackable_children(*args, **options), **layers}

    def recomputed(self, *inputs: Tensor, **options: Any) -> Tensor:
        """Call the layer, but keep only its inputs for the backward pass, which computes all in between again.

        By then nothing is left of the outer call: the training mode is to be among the options, and so is every mask,
        since ``tf.recompute_grad`` takes floats only.
        """
        # Dropout draws from where it stands now, both times. Keras' own RematScope would draw anew.
        dropouts = [layer for layer in self._flatten_layers() if isinstance(layer, keras.layers.Dropout) and layer.rate]
        seeds = [(layer.seed_generator.state, layer.seed_generator.state.value) for layer in dropouts]

        def call(*inputs: Tensor) -> Tensor:
            with keras.StatelessScope(seeds):
                return self(*inputs, **options)

        return tf.recompute_grad(call)(*inputs)
