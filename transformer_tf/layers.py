"""The layers that every framework ships, with this project's names, defaults and initial values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float

__all__ = ["ACTIVATIONS", "Block", "Configured", "Dropout", "LayerNorm", "Linear", "masked_softmax"]


def gelu(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Return ``x Phi(x)``; TensorFlow's own rounds sqrt(2) to float32, also in float64."""
    return x * (0.5 * (1.0 + tf.math.erf(x * math.sqrt(0.5))))


def gelu_tanh(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Return the tanh approximation of ``gelu``; TensorFlow's own rounds its constants to float32."""
    return 0.5 * x * (1.0 + tf.math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": tf.nn.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swish": tf.nn.silu,
}

_LOADING: ContextVar[bool] = ContextVar("loading", default=False)
_OWN_ROWS: ContextVar[tuple[Any, int] | None] = ContextVar("share, shares", default=None)


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


@contextmanager
def own_rows(share: Any, shares: int) -> Iterator[None]:
    """Let dropout draw for the rows of all shares, and keep those of one."""
    before = _OWN_ROWS.set((share, shares))
    try:
        yield
    finally:
        _OWN_ROWS.reset(before)


def masked_softmax(
    scores: Float[Tensor, "*axes M"], mask: Bool[Tensor, "*#axes #M"] | None = None
) -> Float[Tensor, "*axes M"]:
    """Turn scores into weights that sum to one over the allowed keys, and to zero where none is allowed."""
    wide = tf.cast(scores, keras.backend.result_type(scores.dtype, "float32"))  # bfloat16 is too coarse to sum in
    if mask is None:
        return tf.cast(tf.nn.softmax(wide), scores.dtype)
    # The lowest finite score, not -inf: a row of -inf would be NaN, forward and backward.
    weights = tf.nn.softmax(tf.where(mask, wide, tf.constant(wide.dtype.min, wide.dtype)))
    return tf.cast(tf.where(mask, weights, tf.zeros([], wide.dtype)), scores.dtype)


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
        """Keep the arguments, as Keras itself does where they are plain numbers."""
        layer = super().__new__(cls, *args, **kwargs)
        given = cls._signature.bind(layer, *args, **kwargs).arguments
        own = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
        vars(layer)["_given"] = {**own, **given.get("kwargs", {})}  # not by setattr, or Keras would save it
        return layer

    def add_weight(self, shape: Any = None, initializer: Any = None, **options: Any) -> keras.Variable:
        """Create a parameter, as Keras does."""
        return super().add_weight(shape, "zeros" if _LOADING.get() else initializer, **options)  # type: ignore[misc]

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

    def compute_mask(self, *args: Any) -> None:
        """Attach no mask to the output: masks here are always passed by hand, never carried along by Keras."""

    def _show_to_checkpoints(self, layers: list[keras.layers.Layer]) -> None:
        """Let ``tf.train.Checkpoint`` find the layers of a list: by itself it looks into none of Keras' lists."""
        for i, layer in enumerate(layers):
            self._track_trackable(layer, f"layers.{i}")

    def recomputed(self, *inputs: Tensor, **options: Any) -> Tensor:
        """Call the layer, but keep only its inputs for the backward pass, which computes all in between again.

        By then nothing is left of the outer call: the training mode is to be among the options, and so is every mask,
        since ``tf.recompute_grad`` takes floats only.
        """
        # Dropout draws from where it stands now, both times. Keras' own RematScope would draw anew.
        dropouts = [layer for layer in self._flatten_layers() if isinstance(layer, Dropout) and layer.rate]
        seeds = [(layer.seed_generator.state, layer.seed_generator.state.value) for layer in dropouts]

        def call(*inputs: Tensor) -> Tensor:
            with keras.StatelessScope(seeds):
                return self(*inputs, **options)

        return tf.recompute_grad(call)(*inputs)


class Linear(Configured, keras.layers.Dense):
    """Multiply by a matrix and add a bias: ``x W + b``."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(d_out, use_bias=bias, dtype=dtype, **kwargs)
        self.build((None, d_in))


class LayerNorm(Configured, keras.layers.LayerNormalization):
    """Normalise the last axis, then scale and shift it (Ba et al., 2016).

    Kind ``standard`` divides by sqrt(biased variance + epsilon), kind ``annotated`` by (unbiased standard
    deviation + epsilon), as the Annotated Transformer does.
    """

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(epsilon=config.layer_norm_epsilon, dtype=dtype, **kwargs)
        self.kind = config.layer_norm_kind
        self.build((None, config.d_model))

    def call(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Normalise each position of ``x``."""
        if self.kind == "standard":
            return super().call(x)
        wide = tf.cast(x, keras.backend.result_type(x.dtype, "float32"))
        centred = wide - tf.reduce_mean(wide, -1, keepdims=True)
        variance = tf.reduce_sum(tf.square(centred), -1, keepdims=True) / (x.shape[-1] - 1)
        normed = centred / (tf.sqrt(variance) + self.epsilon)
        return tf.cast(normed, x.dtype) * self.gamma + self.beta


class Dropout(Configured, keras.layers.Dropout):
    """Set elements to zero at random and scale the rest, in training only (section 5.4)."""

    def call(self, x: Float[Tensor, "*axes"], training: bool | None = False) -> Float[Tensor, "*axes"]:
        """Return ``x``, or in training a thinned-out copy of it; within ``own_rows`` that of a larger batch."""
        found = _OWN_ROWS.get()
        if found is None or not (training and self.rate):
            return super().call(x, training)
        share, shares = found
        rows, *others = tf.unstack(tf.shape(x))
        # Each number is drawn by its position: rows of padding behind all others change none of them.
        scales = super().call(tf.ones([rows * shares, *others], x.dtype), training)
        return x * scales[share * rows : (share + 1) * rows]
