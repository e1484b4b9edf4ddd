"""Attention (Vaswani et al., 2017, section 3.2).

B batch, H heads, L query length, M memory (key and value) length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.checks import check_attention, check_attention_mask, check_room
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
) -> Float[Tensor, "B H L d_v"]:
    """Average the values, weighted by how well each key answers each query.

    Equation (1): ``Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V``.

    Args:
        query: What each position asks for.
        key: What each memory position offers to be matched on.
        value: What each memory position hands over when matched.
        mask: True where a query may attend to a key; a row of False yields a zero context. None allows every pair.
        dropout: Applied to the weights in training; None keeps them.
        tap: Receives each named intermediate and returns the value to go on with.

    Returns:
        One weighted average of the values per query, in the dtype of ``query``.

    Raises:
        TypeError: The mask is not boolean.
        ValueError: The shapes do not fit each other.

    Taps:
        ``scores`` scaled, before the mask; ``weights`` after softmax, before dropout; ``context``.
    """
    check_attention(tuple(query.shape), tuple(key.shape), tuple(value.shape))
    if mask is not None:
        check_attention_mask(tuple(mask.shape), mask.dtype.name, tuple(query.shape), tuple(key.shape))
    # keras.ops.dot_product_attention rounds 1 / sqrt(d_k) to float32 in a float64 model too. If a row allows no key, it
    # averages over the forbidden ones.
    d_k = query.shape[-1]
    scores = tap("scores", tf.matmul(query, key, transpose_b=True) / math.sqrt(d_k))  # [B, H, L, M]
    weights = tap("weights", masked_softmax(scores, mask))  # [B, H, L, M]
    if dropout is not None:
        weights = dropout(weights)
    return tap("context", weights @ value)  # [B, H, L, d_v]


def split_heads(x: Float[Tensor, "B L width"], num_heads: int) -> Float[Tensor, "B H L d"]:
    """Give each head its contiguous part of the last axis."""
    batch, length, width = keras.ops.shape(x)
    return tf.transpose(tf.reshape(x, [batch, length, num_heads, width // num_heads]), [0, 2, 1, 3])


def merge_heads(x: Float[Tensor, "B H L d"]) -> Float[Tensor, "B L H*d"]:
    """Put the heads side by side again: the inverse of ``split_heads``."""
    batch, heads, length, width = keras.ops.shape(x)
    return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [batch, length, heads * width])


class KeyValues(NamedTuple):
    """What a memory offers to every query, projected once: keys and values per head."""

    key: Float[Tensor, "B H M d_k"]
    value: Float[Tensor, "B H M d_v"]


class Nested:
    """A dataclass that TensorFlow takes apart: it passes through loops and functions, tensor by tensor."""

    def __tf_flatten__(self) -> tuple[Any, Any]:
        """Return what is known of it in advance, which is nothing, and its parts."""
        return (), tuple(vars(self).values())

    @classmethod
    def __tf_unflatten__(cls, _: Any, parts: Any) -> Any:
        """Put parts together again: tensors, or what TensorFlow has in their place."""
        return cls(*parts)


@dataclass
class KeyValueCache(Nested):
    """The keys and values of the target positions so far, with room for those to come.

    Without it, decoding T tokens would project 1 + 2 + ... + T positions instead of T.
    """

    key: Float[Tensor, "B H capacity d_k"]
    value: Float[Tensor, "B H capacity d_v"]
    length: Int[Tensor, ""] = field(default_factory=lambda: tf.constant(0))  # positions held so far

    def append(self, key: Float[Tensor, "B H L d_k"], value: Float[Tensor, "B H L d_v"]) -> KeyValues:
        """Keep the keys and values of the next positions, and return those of all so far.

        Raises:
            ValueError: If there is no room for them. In a ``tf.function``, where the length is unknown, they overwrite
                the last ones.
        """
        check_room(tf.get_static_value(self.length), key.shape[2], self.key.shape[2])
        start = [0, 0, self.length, 0]
        self.key = keras.ops.slice_update(self.key, start, key)
        self.value = keras.ops.slice_update(self.value, start, value)
        self.length += keras.ops.shape(key)[2]
        return KeyValues(self.key, self.value)  # and zeros behind: XLA compiles for shapes, and a mask leaves them out

    def reorder(self, rows: Int[Tensor, " B"]) -> None:
        """Let each row go on from the positions of another."""
        self.key = tf.gather(self.key, rows)
        self.value = tf.gather(self.value, rows)


class MultiHeadAttention(Block):
    """Attend with several heads at once, each in its own projection of the inputs (section 3.2.2).

    ``MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O`` with
    ``head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)``.

    Taps:
        ``query``, ``key``, ``value`` per head; ``scores``, ``weights``, ``context``; ``output``.
    """

    def __init__(self, config: TransformerConfig, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.num_heads = config.num_heads
        bias = config.attention_bias
        d_k, d_v = config.num_heads * config.d_k, config.num_heads * config.d_v  # of all heads
        with keras.name_scope(self.name):
            self.query_proj = Linear(config.d_model, d_k, bias=bias, dtype=dtype, name="query")
            self.key_proj = Linear(config.d_model, d_k, bias=bias, dtype=dtype, name="key")
            self.value_proj = Linear(config.d_model, d_v, bias=bias, dtype=dtype, name="value")
            self.output_proj = Linear(d_v, config.d_model, bias=bias, dtype=dtype, name="output")
        self.dropout = Dropout(config.dropout.attention, dtype=dtype, name="dropout")
        self.attend = scaled_dot_product_attention  # fast.accelerate replaces it

    def call(
        self,
        query: Float[Tensor, "B L d_model"],
        memory: Float[Tensor, "B M d_model"] | KeyValues,
        attention_mask: Bool[Tensor, "#N #H #L #K"] | None = None,
        tap: Tap = no_tap,
        past: KeyValueCache | None = None,
        training: bool | None = None,
    ) -> Float[Tensor, "B L d_model"]:
        """Let each query position gather from the memory positions that the mask allows.

        Args:
            query: The positions that ask.
            memory: The positions that answer, the same as ``query`` in self-attention; or their keys and values.
            attention_mask: True where a query may attend to a memory position. None allows every pair.
            tap: Receives each named intermediate and returns the value to go on with.
            past: Keys and values of earlier positions, which answer too; those of ``memory`` are added to them.
            training: Applies dropout. Keras hands on the mode of the layer around.
        """
        mask = attention_mask_for(memory, attention_mask)
        shape = tf.shape(query)
        if isinstance(memory, KeyValues):  # the hypotheses of a sentence ask its memory side by side
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
        dropout = self.dropout if training and self.dropout.rate else None
        context = self.attend(q, k, v, mask, dropout, tap)
        return tap("output", tf.reshape(self.output_proj(merge_heads(context)), shape))

    def project(self, memory: Float[Tensor, "B M d_model"]) -> KeyValues:
        """Return the keys and values of memory positions, to be attended to again and again."""
        return KeyValues(
            split_heads(self.key_proj(memory), self.num_heads), split_heads(self.value_proj(memory), self.num_heads)
        )
