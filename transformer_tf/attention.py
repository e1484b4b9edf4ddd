"""Attention (Vaswani et al., 2017, section 3.2).

Axes: B batch, H heads, L query length, M memory length (number of keys and values).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.checks import check_attention, check_attention_bias, check_attention_mask, check_capacity
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap
from transformer_tf.block import Block, attention_mask_for
from transformer_tf.layers import Dropout, Linear, masked_softmax


def scaled_dot_product_attention(
    query: Float[Tensor, "B H L d_k"],
    key: Float[Tensor, "B H M d_k"],
    value: Float[Tensor, "B H M d_v"],
    mask: Bool[Tensor, "#B #H #L #M"] | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
    tap: Tap = no_tap,
    bias: Float[Tensor, "#B #H #L #M"] | None = None,
) -> Float[Tensor, "B H L d_v"]:
    """Return a weighted average of the values for each query. The weights depend on the similarity of query and key.

    Equation (1): ``Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V``.

    Args:
        query: One query vector per position.
        key: One key vector per memory position.
        value: One value vector per memory position.
        mask: For each query and key, True if the query may attend to the key. If a query can't attend to any key, its
            context is zero. If None, no mask is applied.
        dropout: Function that applies dropout to the attention weights. If None, no dropout is applied.
        tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
            replaces the intermediate value.
        bias: Numbers that are added to the scores, such as a relative position bias. If None, no bias is added.

    Returns:
        The context: one weighted average of the values for each query, in the dtype of ``query``.

    Raises:
        TypeError: If the mask is not boolean.
        ValueError: If the shapes of the arguments don't match.

    Taps:
        scores: Scaled scores plus bias, before the mask.
        weights: Attention weights, before dropout.
        context: Weighted averages of the values.
    """
    check_attention(tuple(query.shape), tuple(key.shape), tuple(value.shape))
    if mask is not None:
        check_attention_mask(tuple(mask.shape), mask.dtype.name, tuple(query.shape), tuple(key.shape))
    # keras.ops.dot_product_attention rounds 1 / sqrt(d_k) to float32, even in a float64 model. If a query has no
    # allowed key, this Keras function averages over the forbidden keys.
    d_k = query.shape[-1]
    scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(d_k)  # [B, H, L, M]
    if bias is not None:
        check_attention_bias(tuple(bias.shape), tuple(query.shape), tuple(key.shape))
        scores = scores + bias
    scores = tap("scores", scores)
    weights = tap("weights", masked_softmax(scores, mask))  # [B, H, L, M]
    if dropout is not None:
        weights = dropout(weights)
    return tap("context", weights @ value)  # [B, H, L, d_v]


def split_heads(x: Float[Tensor, "B L width"], num_heads: int) -> Float[Tensor, "B H L d"]:
    """Split the last axis into heads. Each head gets a contiguous slice.

    Args:
        x: Projected vectors, with the heads concatenated along the last axis.
        num_heads: Number of heads, which must divide the last axis.
    """
    batch, length, width = keras.ops.shape(x)
    return tf.transpose(tf.reshape(x, [batch, length, num_heads, width // num_heads]), [0, 2, 1, 3])


def merge_heads(x: Float[Tensor, "B H L d"]) -> Float[Tensor, "B L H*d"]:
    """Concatenate the heads along the last axis. This is the inverse of ``split_heads``.

    Args:
        x: One vector per head and position.
    """
    batch, heads, length, width = keras.ops.shape(x)
    return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [batch, length, heads * width])


class KeyValues(NamedTuple):
    """Keys and values of the memory positions, computed once for use in multiple attention calls.

    Attributes:
        key: Key of each position, per head.
        value: Value of each position, per head.
    """

    key: Float[Tensor, "B H M d_k"]
    value: Float[Tensor, "B H M d_v"]


class Nested:
    """Base class of dataclasses that TensorFlow can flatten into tensors, and therefore pass to loops and functions."""

    def __tf_flatten__(self) -> tuple[Any, Any]:
        """Return the static metadata (none) and the fields."""
        return (), tuple(vars(self).values())

    @classmethod
    def __tf_unflatten__(cls, _: Any, parts: Any) -> Any:
        """Rebuild the dataclass from its fields, which may be TensorFlow's placeholders for tensors."""
        return cls(*parts)


@dataclass
class KeyValueCache(Nested):
    """Keys and values of the target positions decoded so far, in buffers of fixed capacity.

    With a cache, the decoder computes the keys and values of T positions to generate T tokens. Without a cache, each
    step would recompute the keys and values of all earlier positions, 1 + 2 + ... + T positions in total.

    Attributes:
        key: Buffer for the keys.
        value: Buffer for the values.
        length: Number of positions stored in the buffers.
    """

    key: Float[Tensor, "B H capacity d_k"]
    value: Float[Tensor, "B H capacity d_v"]
    length: Int[Tensor, ""] = field(default_factory=lambda: tf.constant(0))  # number of stored positions

    def append(self, key: Float[Tensor, "B H L d_k"], value: Float[Tensor, "B H L d_v"]) -> KeyValues:
        """Store the keys and values of the next positions, and return the full buffers.

        Args:
            key: Keys of the next positions.
            value: Values of the next positions.

        Returns:
            The buffers, which contain zeros after the last stored position. The caller must mask out these zeros.

        Raises:
            ValueError: If the new positions exceed the capacity. In a ``tf.function``, where the length is unknown, the
                new positions overwrite the last positions instead.
        """
        check_capacity(tf.get_static_value(self.length), key.shape[2], self.key.shape[2])
        start = [0, 0, self.length, 0]
        self.key = keras.ops.slice_update(self.key, start, key)
        self.value = keras.ops.slice_update(self.value, start, value)
        self.length += keras.ops.shape(key)[2]
        return KeyValues(self.key, self.value)  # full buffers, because XLA needs static shapes

    def reorder(self, rows: Int[Tensor, " B"]) -> None:
        """Replace row i of the buffers with row ``rows[i]``.

        Args:
            rows: For each row of the result, the index of the row to copy.
        """
        self.key = tf.gather(self.key, rows)
        self.value = tf.gather(self.value, rows)


class MultiHeadAttention(Block):
    """Multi-head attention: several attention heads in parallel, each with its own projections (section 3.2.2).

    ``MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O`` with ``head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)``.

    Args:
        config: Model configuration, which defines the number and size of the heads.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.

    Taps:
        query, key, value: Projected inputs, per head.
        scores, weights, context: Taps of ``scaled_dot_product_attention``.
        output: Output of the layer.
    """

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.num_heads = config.num_heads
        self.scale_scores = config.scale_scores
        bias = config.attention_bias
        d_k, d_v = config.num_heads * config.d_k, config.num_heads * config.d_v  # total width of all heads
        gain = 1.0 if config.scale_scores else config.d_k**-0.5  # scores start at the same scale in T5
        with keras.name_scope(self.name):
            self.query_proj = Linear(config.d_model, d_k, bias=bias, dtype=dtype, gain=gain, name="query")
            self.key_proj = Linear(config.d_model, d_k, bias=bias, dtype=dtype, name="key")
            self.value_proj = Linear(config.d_model, d_v, bias=bias, dtype=dtype, name="value")
            self.output_proj = Linear(d_v, config.d_model, bias=bias, dtype=dtype, name="output")
        self.dropout = Dropout(config.dropout.attention, dtype=dtype, name="dropout")
        self.attend = scaled_dot_product_attention  # fast.accelerate may replace this function

    def call(
        self,
        query: Float[Tensor, "B L d_model"],
        memory: Float[Tensor, "B M d_model"] | KeyValues,
        attention_mask: Bool[Tensor, "#N #H #L #K"] | None = None,
        tap: Tap = no_tap,
        past: KeyValueCache | None = None,
        training: bool | None = None,
        bias: Float[Tensor, "#N #H #L #K"] | None = None,
    ) -> Float[Tensor, "B L d_model"]:
        """Attend from each query position to the memory positions, and return one vector per query position.

        Args:
            query: One vector per query position.
            memory: One vector per memory position. In self-attention, this is the same array as ``query``. To reuse
                keys and values between calls, pass the result of ``project``.
            attention_mask: True if a query position may attend to a memory position. If None, no mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            past: Cache of the keys and values of earlier positions. The method appends the keys and values of
                ``memory`` to the cache, and attends to all positions in the cache. If None, the method attends only to
                ``memory``.
            training: If True, dropout is enabled. If None, the mode of the enclosing Keras layer is used.
            bias: Numbers that are added to the scores, such as a relative position bias. If None, no bias is added.
        """
        mask = attention_mask_for(memory, attention_mask)
        shape = tf.shape(query)
        if isinstance(memory, KeyValues):  # all hypotheses of a source sequence share one memory
            query = tf.reshape(query, [keras.ops.shape(memory.key)[0], -1, query.shape[2]])
        q = tap("query", split_heads(self.query_proj(query), self.num_heads))  # [B, H, L, d_k]
        if isinstance(memory, KeyValues):
            k, v = memory
        else:
            k, v = self.project(memory)
            k = tap("key", k)  # [B, H, M, d_k]
            v = tap("value", v)  # [B, H, M, d_v]
        if past is not None:
            k, v = past.append(k, v)
        if not self.scale_scores:
            q = q * math.sqrt(q.shape[-1])  # cancels the division in equation (1)
        dropout = self.dropout if training and self.dropout.rate else None
        context = self.attend(q, k, v, mask, dropout, tap, bias)
        return tap("output", tf.reshape(self.output_proj(merge_heads(context)), shape))

    def project(self, memory: Float[Tensor, "B M d_model"]) -> KeyValues:
        """Return the keys and values of the memory positions, for use in multiple calls.

        Args:
            memory: One vector per memory position.
        """
        return KeyValues(
            split_heads(self.key_proj(memory), self.num_heads), split_heads(self.value_proj(memory), self.num_heads)
        )
