"""The layers that every framework ships, with this project's names, defaults and initial values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float
from transformer_tf.block import Configured, initial

__all__ = ["ACTIVATIONS", "Dropout", "LayerNorm", "Linear", "masked_softmax"]


def gelu(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Return ``x Phi(x)``. TensorFlow's own rounds sqrt(2) to float32 in float64 too, and has no digit left at -10."""
    return 0.5 * x * tf.math.erfc(-x * math.sqrt(0.5))


def gelu_tanh(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Return the tanh approximation of ``gelu``; TensorFlow's own rounds its constants to float32."""
    return 0.5 * x * (1.0 + tf.math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": tf.nn.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swish": tf.nn.silu,
}

_OWN_ROWS: ContextVar[tuple[Any, int] | None] = ContextVar("share, shares", default=None)


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


def Linear(d_in: int, d_out: int, *, bias: bool, dtype: Any = None, **kwargs: Any) -> keras.layers.Dense:  # noqa: N802
    """Return a layer that computes ``x W + b``. ``W`` starts with Xavier's values, ``b`` with zeros."""
    xavier = initial("glorot_uniform")
    layer = keras.layers.Dense(d_out, use_bias=bias, kernel_initializer=xavier, dtype=dtype, **kwargs)
    layer.build((None, d_in))
    return layer


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
