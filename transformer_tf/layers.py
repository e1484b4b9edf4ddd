"""Keras' basic layers, with this package's parameter names, defaults, and initial values."""

from __future__ import annotations

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
from transformer_tf.block import Configured, initial

__all__ = ["ACTIVATIONS", "Dropout", "LayerNorm", "Linear", "RMSNorm", "make_norm", "masked_softmax"]


def gelu(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Return ``x Phi(x)``, the exact GELU.

    TensorFlow's own function rounds sqrt(2) to float32 even in float64, and loses all digits at x = -10.
    """
    return 0.5 * x * tf.math.erfc(-x * math.sqrt(0.5))


def gelu_tanh(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Return the tanh approximation of GELU. TensorFlow's own function rounds the constants to float32."""
    return 0.5 * x * (1.0 + tf.math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": tf.nn.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swish": tf.nn.silu,
}

_OWN_ROWS: ContextVar[tuple[Any, int] | None] = ContextVar("shard, shards", default=None)


@contextmanager
def own_rows(shard: Any, shards: int) -> Iterator[None]:
    """Within the context, dropout samples the mask for the full batch but uses only the rows of one shard.

    Args:
        shard: Index of the shard.
        shards: Number of shards.
    """
    before = _OWN_ROWS.set((shard, shards))
    try:
        yield
    finally:
        _OWN_ROWS.reset(before)


def masked_softmax(
    scores: Float[Tensor, "*axes M"], mask: Bool[Tensor, "*#axes #M"] | None = None
) -> Float[Tensor, "*axes M"]:
    """Return the softmax over the allowed keys. If no key is allowed, all weights are zero.

    Args:
        scores: Similarity of each key to the query.
        mask: True if a key is allowed. If None, every key is allowed.
    """
    wide = tf.cast(scores, keras.backend.result_type(scores.dtype, "float32"))  # bfloat16 is too imprecise for sums
    if mask is None:
        return tf.cast(tf.nn.softmax(wide), scores.dtype)
    # Use the lowest finite score, because a row of -inf would give NaN in both the forward and the backward pass.
    weights = tf.nn.softmax(tf.where(mask, wide, tf.constant(wide.dtype.min, wide.dtype)))
    return tf.cast(tf.where(mask, weights, tf.zeros([], wide.dtype)), scores.dtype)


def Linear(  # noqa: N802  the name of a layer
    d_in: int, d_out: int, *, bias: bool, dtype: Any = None, gain: float = 1.0, **kwargs: Any
) -> keras.layers.Dense:
    """Return a ``keras.layers.Dense``, ``x W + b``, with a Xavier-uniform matrix and a zero bias.

    Args:
        d_in: Size of the last axis of the input.
        d_out: Size of the last axis of the output.
        bias: Whether to add a bias.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        gain: Factor by which the initial values of the matrix are multiplied.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.
    """
    xavier = initial(keras.initializers.VarianceScaling(gain**2, "fan_avg", "uniform"))
    layer = keras.layers.Dense(d_out, use_bias=bias, kernel_initializer=xavier, dtype=dtype, **kwargs)
    layer.build((None, d_in))
    return layer


class LayerNorm(Configured, keras.layers.LayerNormalization):
    """Layer normalization over the last axis, followed by a learned scale and bias (Ba et al., 2016).

    If ``config.layer_norm_kind`` is ``standard``, the divisor is sqrt(biased variance + epsilon). If it is
    ``annotated``, the divisor is (unbiased standard deviation + epsilon), as in the Annotated Transformer.

    Args:
        config: Model configuration, which defines the size, the epsilon, and the formula for the divisor.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.
    """

    _attributes: ClassVar[dict[str, str]] = {"epsilon": "layer_norm_epsilon"}

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(epsilon=config.layer_norm_epsilon, dtype=dtype, **kwargs)
        self.kind = config.layer_norm_kind
        self.build((None, config.d_model))

    def call(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Normalize each position of ``x``."""
        if self.kind == "standard":
            return super().call(x)
        wide = tf.cast(x, keras.backend.result_type(x.dtype, "float32"))
        centered = wide - tf.reduce_mean(wide, -1, keepdims=True)
        variance = tf.reduce_sum(tf.square(centered), -1, keepdims=True) / (x.shape[-1] - 1)
        normed = centered / (tf.sqrt(variance) + self.epsilon)
        return tf.cast(normed, x.dtype) * self.gamma + self.beta


class RMSNorm(Configured, keras.layers.RMSNormalization):
    """Root mean square normalization over the last axis, followed by a learned scale (Zhang and Sennrich, 2019).

    Args:
        config: Model configuration, which defines the size and the epsilon.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.
    """

    _attributes: ClassVar[dict[str, str]] = {"epsilon": "layer_norm_epsilon"}

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(epsilon=config.layer_norm_epsilon, dtype=dtype, **kwargs)
        self.build((None, config.d_model))

    @property
    def gamma(self) -> keras.Variable:
        """The learned scale. ``LayerNormalization`` in Keras also calls its scale ``gamma``."""
        return self.scale


def make_norm(config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> LayerNorm | RMSNorm:
    """Return an ``RMSNorm`` if ``config.layer_norm_kind`` is ``rms``, and a ``LayerNorm`` otherwise."""
    return (RMSNorm if config.layer_norm_kind == "rms" else LayerNorm)(config, dtype, **kwargs)


class Dropout(Configured, keras.layers.Dropout):
    """Dropout: sets random elements to zero and scales the rest by 1 / (1 - rate), in training only (section 5.4).

    The constructor takes the same arguments as ``keras.layers.Dropout``.
    """

    _attributes: ClassVar[dict[str, str]] = {"rate": "rate"}

    def call(self, x: Float[Tensor, "*axes"], training: bool | None = False) -> Float[Tensor, "*axes"]:
        """Return ``x`` unchanged in inference, or with dropout applied in training.

        Args:
            x: Tensor of any shape.
            training: If True, dropout is enabled.
        """
        found = _OWN_ROWS.get()
        if found is None or not (training and self.rate):
            return super().call(x, training)
        shard, shards = found
        rows, *others = tf.unstack(tf.shape(x))
        # Each random number depends only on its position, so padding rows at the end don't affect other rows.
        scales = super().call(tf.ones([rows * shards, *others], x.dtype), training)
        return x * scales[shard * rows : (shard + 1) * rows]
