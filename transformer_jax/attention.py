"""Attention (Vaswani et al., 2017, section 3.2).

B batch, H heads, L query length, M memory (key and value) length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
from flax import nnx
from jax import Array

from transformer_jax.layers import Dropout, Linear, masked_softmax
from transformer_spec.checks import check_attention, check_attention_mask, check_room
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap


def scaled_dot_product_attention(
    query: Float[Array, "B H L d_k"],
    key: Float[Array, "B H M d_k"],
    value: Float[Array, "B H M d_v"],
    mask: Bool[Array, "#B #H #L #M"] | None = None,
    dropout: Callable[[Array], Array] | None = None,
    tap: Tap = no_tap,
) -> Float[Array, "B H L d_v"]:
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
    check_attention(query.shape, key.shape, value.shape)
    if mask is not None:
        check_attention_mask(mask.shape, mask.dtype.name, query.shape, key.shape)
    # jax.nn.dot_product_attention computes the softmax in float32 even in a float64 model, averages over forbidden keys
    # if a row allows none, and requires d_k == d_v. Its cuDNN kernel accepts only float16 and bfloat16. Under jit, XLA
    # compiles these lines as a whole.
    d_k = query.shape[-1]
    scores = tap("scores", query @ key.mT / math.sqrt(d_k))  # [B, H, L, M]
    weights = tap("weights", masked_softmax(scores, mask))  # [B, H, L, M]
    if dropout is not None:
        weights = dropout(weights)
    return tap("context", weights @ value)  # [B, H, L, d_v]


def split_heads(x: Float[Array, "B L width"], num_heads: int) -> Float[Array, "B H L d"]:
    """Give each head its contiguous part of the last axis."""
    batch, length, width = x.shape
    return x.reshape(batch, length, num_heads, width // num_heads).transpose(0, 2, 1, 3)


def merge_heads(x: Float[Array, "B H L d"]) -> Float[Array, "B L H*d"]:
    """Put the heads side by side again: the inverse of ``split_heads``."""
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


class KeyValues(NamedTuple):
    """What a memory offers to every query, projected once: keys and values per head."""

    key: Float[Array, "B H M d_k"]
    value: Float[Array, "B H M d_v"]


@jax.tree_util.register_dataclass
@dataclass
class KeyValueCache:
    """The keys and values of the target positions so far, with room for those to come.

    Without it, decoding T tokens would project 1 + 2 + ... + T positions instead of T.
    """

    key: Float[Array, "B H capacity d_k"]
    value: Float[Array, "B H capacity d_v"]
    length: Int[Array, ""] | int = 0  # positions held so far

    def append(self, key: Float[Array, "B H L d_k"], value: Float[Array, "B H L d_v"]) -> KeyValues:
        """Keep the keys and values of the next positions, and return those of all so far.

        Raises:
            ValueError: If the capacity is exceeded. Traced code does not know the length: there, they overwrite the
                last positions instead.
        """
        length = None if isinstance(self.length, jax.core.Tracer) else int(self.length)
        check_room(length, key.shape[2], self.key.shape[2])
        self.key = jax.lax.dynamic_update_slice_in_dim(self.key, key, self.length, axis=2)
        self.value = jax.lax.dynamic_update_slice_in_dim(self.value, value, self.length, axis=2)
        self.length += key.shape[2]
        return KeyValues(self.key, self.value)  # and zeros behind them: shapes are fixed, and the mask leaves them out

    def reorder(self, rows: Int[Array, " B"]) -> None:
        """Let each row go on from the positions of another."""
        self.key, self.value = self.key[rows], self.value[rows]


class MultiHeadAttention(nnx.Module):
    """Attend with several heads at once, each in its own projection of the inputs (section 3.2.2).

    ``MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O`` with
    ``head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)``.

    Taps:
        ``query``, ``key``, ``value`` per head; ``scores``, ``weights``, ``context``; ``output``.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        self.num_heads = config.num_heads
        bias = config.attention_bias
        self.query_proj = Linear(config.d_model, config.num_heads * config.d_k, bias=bias, dtype=dtype, rngs=rngs)
        self.key_proj = Linear(config.d_model, config.num_heads * config.d_k, bias=bias, dtype=dtype, rngs=rngs)
        self.value_proj = Linear(config.d_model, config.num_heads * config.d_v, bias=bias, dtype=dtype, rngs=rngs)
        self.output_proj = Linear(config.num_heads * config.d_v, config.d_model, bias=bias, dtype=dtype, rngs=rngs)
        self.dropout = Dropout(config.dropout.attention, rngs=rngs)
        self.attend = scaled_dot_product_attention  # fast.accelerate replaces it

    def __call__(
        self,
        query: Float[Array, "B L d_model"],
        memory: Float[Array, "B M d_model"] | KeyValues,
        mask: Bool[Array, "#N #H #L #K"] | None = None,
        tap: Tap = no_tap,
        past: KeyValueCache | None = None,
    ) -> Float[Array, "B L d_model"]:
        """Let each query position gather from the memory positions that the mask allows.

        Args:
            query: The positions that ask.
            memory: The positions that answer, the same as ``query`` in self-attention; or their keys and values.
            mask: True where a query may attend to a memory position. None allows every pair.
            tap: Receives each named intermediate and returns the value to go on with.
            past: Keys and values of earlier positions, which answer too; those of ``memory`` are added to them.
        """
        shape = query.shape
        if isinstance(memory, KeyValues):  # the hypotheses of a sentence ask its memory side by side
            query = query.reshape(len(memory.key), -1, shape[-1])
        q = tap("query", split_heads(self.query_proj(query), self.num_heads))  # [B, H, L, d_k]
        if isinstance(memory, KeyValues):
            k, v = memory
        else:
            k, v = self.project(memory)
            k = tap("key", k)  # [B, H, M, d_k]
            v = tap("value", v)  # [B, H, M, d_v]
        if past is not None:
            k, v = past.append(k, v)
        dropout = self.dropout if self.dropout.rate and not self.dropout.deterministic else None
        context = self.attend(q, k, v, mask, dropout, tap)
        return tap("output", self.output_proj(merge_heads(context)).reshape(shape))

    def project(self, memory: Float[Array, "B M d_model"]) -> KeyValues:
        """Return the keys and values of memory positions, to be attended to again and again."""
        return KeyValues(
            split_heads(self.key_proj(memory), self.num_heads), split_heads(self.value_proj(memory), self.num_heads)
        )
