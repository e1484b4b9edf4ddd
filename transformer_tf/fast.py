"""Optimized functions and layers.

A model with ``fast=False`` doesn't use them, but computes the same results up to rounding. ``accelerate`` makes
attention process long inputs block by block. Searches select the best extensions block by block, and a trainer updates
its parameters using TensorFlow's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.checks import check_attention, check_attention_bias, check_attention_mask
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap
from transformer_tf.attention import MultiHeadAttention, scaled_dot_product_attention
from transformer_tf.optimizer import Adam

BLOCK = 32  # values per block; only the blocks with the largest maxima are sorted
QUERY_BLOCK = 256  # maximum number of queries whose scores are computed at once


def accelerate(model: keras.Model) -> None:
    """Make the attention layers of a model process long inputs in blocks."""
    for layer in model._flatten_layers():
        if isinstance(layer, MultiHeadAttention):
            layer.attend = attend_by_blocks


def attend_by_blocks(
    query: Float[Tensor, "B H L d_k"],
    key: Float[Tensor, "B H M d_k"],
    value: Float[Tensor, "B H M d_v"],
    mask: Bool[Tensor, "#B #H #L #M"] | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
    tap: Tap = no_tap,
    bias: Float[Tensor, "#B #H #L #M"] | None = None,
) -> Float[Tensor, "B H L d_v"]:
    """Compute ``scaled_dot_product_attention``. For long inputs on a CPU, compute it in blocks.

    The blocks avoid storing all attention weights at once. If a tap or dropout is used, attention isn't computed in
    blocks, because taps and dropout require the full array of attention weights.
    """
    check_attention(tuple(query.shape), tuple(key.shape), tuple(value.shape))
    if mask is not None:
        check_attention_mask(tuple(mask.shape), mask.dtype.name, tuple(query.shape), tuple(key.shape))
    if bias is not None:
        check_attention_bias(tuple(bias.shape), tuple(query.shape), tuple(key.shape))
    is_long = query.shape[2] is not None and query.shape[2] > QUERY_BLOCK
    # A GPU is faster if it processes all heads at once.
    if tap is no_tap and dropout is None and is_long and not tf.config.list_physical_devices("GPU"):
        return _attend_in_blocks(query, key, value, mask, bias)
    return scaled_dot_product_attention(query, key, value, mask, dropout, tap, bias)


def _attend_in_blocks(query, key, value, mask, bias):
    """Compute attention for one head and one block of queries at a time. The backward pass recomputes the scores."""
    batch, heads, length, width = keras.ops.shape(query)
    blocks = -(-length // QUERY_BLOCK)
    padding = [[0, 0], [0, 0], [0, blocks * QUERY_BLOCK - length], [0, 0]]

    def padded(x):
        if x is not None and x.shape[2] is None:  # the size is unknown during tracing and may be 1
            x = tf.broadcast_to(x, [*tf.unstack(tf.shape(x)[:2]), length, tf.shape(x)[3]])
        return x if x is None or x.shape[2] == 1 else tf.pad(x, padding)

    mask, bias = padded(mask), padded(bias)

    def attend(b, h, i, block, key, value):
        def part(x):  # if a mask or a bias broadcasts along an axis, the slice starts at 0
            start = tf.minimum(tf.stack([b, h, i * QUERY_BLOCK, 0]), tf.shape(x) - 1)
            return tf.slice(x, start, [1, 1, min(QUERY_BLOCK, x.shape[2]), tf.shape(x)[3]])

        allowed = None if mask is None else part(mask)

        @tf.recompute_grad
        def context(query, key, value, added=None):
            query, key, value = (x[None, None] for x in (query, key, value))
            return scaled_dot_product_attention(query, key, value, allowed, bias=added)[0, 0]

        return context(block, key, value, *([] if bias is None else [part(bias)]))

    def each(function, *arrays):
        numbered = (tf.range(tf.shape(arrays[0])[0]), *arrays)
        return tf.map_fn(
            lambda inputs: function(*inputs), numbered, fn_output_signature=value.dtype, parallel_iterations=1
        )

    query = tf.reshape(tf.pad(query, padding), [batch, heads, blocks, QUERY_BLOCK, width])
    context = each(
        lambda b, *sentence: each(
            lambda h, query, *memory: each(lambda i, block: attend(b, h, i, block, *memory), query), *sentence
        ),
        *(query, key, value),
    )
    return tf.reshape(context, [batch, heads, blocks * QUERY_BLOCK, value.shape[3]])[:, :, :length]


def top_by_blocks(
    values: Float[Tensor, "B N"], count: int | Int[Tensor, ""]
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the largest values of each row and their indices. Ties go to the lower index.

    On a CPU, computing the maximum of each block takes 85% less time than ``top_k`` on all values. The largest values
    are in the blocks with the largest maxima, or in the remainder after the last block. If blocks have the same
    maximum, earlier blocks are preferred. If there are at most ``count`` blocks, ``top_k`` is applied to all values.
    Sizes are unknown during tracing, so there is no separate code path for this case.
    """
    rows, size = keras.ops.shape(values)
    values = tf.where(~tf.math.is_nan(values), values, inf)  # rank NaN first, so that the search raises an error
    blocks, rest = size // BLOCK, size % BLOCK
    maxima = tf.reduce_max(tf.reshape(values[:, : size - rest], [rows, blocks, BLOCK]), -1)
    _, block = tf.math.top_k(maxima, tf.minimum(count, blocks))
    # Keep the original order, so that ties go to the lower index.
    place = tf.reshape(tf.sort(block)[:, :, None] * BLOCK + tf.range(BLOCK), [rows, -1])
    place = tf.concat([place, tf.tile(tf.range(size - rest, size)[None], [rows, 1])], 1)
    best, at = tf.math.top_k(tf.gather(values, place, batch_dims=1), count)
    return best, tf.gather(place, at, batch_dims=1)


class FastAdam(Adam):
    """Adam that uses TensorFlow's kernel, which reads and writes memory once instead of a dozen times."""

    def update(
        self, gradient: Mapping[str, Tensor], scale: Tensor, learning_rate: Tensor, corrections: tuple[Tensor, Tensor]
    ) -> None:
        """Take a step: update parameters and moments in place.

        The kernel adds epsilon before the bias correction, so the method rescales epsilon accordingly. In float32, the
        kernel rounds ``1 - beta``, which causes a relative error of 1e-6 at a beta of 0.98.
        """
        settings = self.settings
        correction1, correction2 = corrections
        root, zero = tf.sqrt(correction2), tf.zeros_like(correction2)
        numbers = {
            "lr": learning_rate * root / correction1,
            "beta1": tf.constant(settings.beta1, root.dtype),
            "beta2": tf.constant(settings.beta2, root.dtype),
            "epsilon": settings.epsilon * root,
            **dict.fromkeys(("beta1_power", "beta2_power"), zero),  # the learning rate includes the bias correction
        }
        for name, g in gradient.items():
            theta, m, v = self.parameters[name], self.first_moment[name], self.second_moment[name]
            tf.raw_ops.ResourceApplyAdam(var=theta.handle, m=m.handle, v=v.handle, grad=scale * g, **numbers)
