"""Attention (Vaswani et al., 2017, section 3.2).

Axes: B batch, H heads, L query length, M memory length (number of keys and values).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from reference_numpy.functional import masked_softmax, masked_softmax_backward
from reference_numpy.layers import Dropout, Linear
from transformer_spec.checks import check_attention, check_attention_bias, check_attention_mask, check_capacity
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap


def scaled_dot_product_attention(
    query: Float[ndarray, "B H L d_k"],
    key: Float[ndarray, "B H M d_k"],
    value: Float[ndarray, "B H M d_v"],
    mask: Bool[ndarray, "#B #H #L #M"] | None = None,
    dropout: Callable[[ndarray], ndarray] | None = None,
    tap: Tap = no_tap,
    bias: Float[ndarray, "#B #H #L #M"] | None = None,
) -> Float[ndarray, "B H L d_v"]:
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
    check_attention(query.shape, key.shape, value.shape)
    if mask is not None:
        check_attention_mask(mask.shape, mask.dtype.name, query.shape, key.shape)
    d_k = query.shape[-1]
    scores = query @ key.mT / math.sqrt(d_k)  # [B, H, L, M]
    if bias is not None:
        check_attention_bias(bias.shape, query.shape, key.shape)
        scores = scores + bias
    scores = tap("scores", scores)
    weights = tap("weights", masked_softmax(scores, mask))  # [B, H, L, M]
    if dropout is not None:
        weights = dropout(weights)
    return tap("context", weights @ value)  # [B, H, L, d_v]


def scaled_dot_product_attention_backward(
    query: Float[ndarray, "B H L d_k"],
    key: Float[ndarray, "B H M d_k"],
    value: Float[ndarray, "B H M d_v"],
    weights: Float[ndarray, "B H L M"],
    dcontext: Float[ndarray, "B H L d_v"],
    dropout: Callable[[ndarray], ndarray] | None = None,
    tap: Tap = no_tap,
) -> tuple[
    Float[ndarray, "B H L d_k"], Float[ndarray, "B H M d_k"], Float[ndarray, "B H M d_v"], Float[ndarray, "B H L M"]
]:
    """Return the gradients with respect to ``query``, ``key``, ``value``, and the scores.

    The gradient with respect to the scores is also the gradient with respect to a bias of the same shape.

    Args:
        query: Query vectors of the forward pass.
        key: Key vectors of the forward pass.
        value: Value vectors of the forward pass.
        weights: Attention weights of the forward pass, before dropout. They are zero for masked keys, so the backward
            pass needs no mask.
        dcontext: Gradient with respect to the context.
        dropout: Function that applies the dropout of the forward pass. Because dropout is linear, the backward pass
            applies this function both to the weights and to their gradient. If None, no dropout is applied.
        tap: Callback that receives the gradient at each tap of the forward pass. Its return value replaces the
            gradient.
    """
    dropout = dropout or (lambda x: x)
    dcontext = tap("context", dcontext)
    dvalue = dropout(weights).mT @ dcontext
    dweights = tap("weights", dropout(dcontext @ value.mT))  # [B, H, L, M]
    dscores = tap("scores", masked_softmax_backward(weights, dweights))  # [B, H, L, M]
    scale = math.sqrt(query.shape[-1])
    return dscores @ key / scale, dscores.mT @ query / scale, dvalue, dscores


def split_heads(x: Float[ndarray, "B L width"], num_heads: int) -> Float[ndarray, "B H L d"]:
    """Split the last axis into heads. Each head gets a contiguous slice.

    Args:
        x: Projected vectors, with the heads concatenated along the last axis.
        num_heads: Number of heads, which must divide the last axis.
    """
    batch, length, width = x.shape
    return x.reshape(batch, length, num_heads, width // num_heads).transpose(0, 2, 1, 3)


def merge_heads(x: Float[ndarray, "B H L d"]) -> Float[ndarray, "B L H*d"]:
    """Concatenate the heads along the last axis. This is the inverse of ``split_heads``.

    Args:
        x: One vector per head and position.
    """
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


class KeyValues(NamedTuple):
    """Keys and values of the memory positions, computed once for use in multiple attention calls.

    Attributes:
        key: Key of each position, per head.
        value: Value of each position, per head.
    """

    key: Float[ndarray, "B H M d_k"]
    value: Float[ndarray, "B H M d_v"]


class KeyValueCache:
    """Keys and values of the target positions decoded so far, in buffers of fixed capacity.

    With a cache, the decoder computes the keys and values of T positions to generate T tokens. Without a cache, each
    step would recompute the keys and values of all earlier positions, 1 + 2 + ... + T positions in total.

    Args:
        key: Buffer for the keys.
        value: Buffer for the values.

    Attributes:
        length: Number of positions stored in the buffers.
    """

    def __init__(self, key: Float[ndarray, "B H capacity d_k"], value: Float[ndarray, "B H capacity d_v"]) -> None:
        self.key = key
        self.value = value
        self.length = 0  # number of stored positions

    def append(self, key: Float[ndarray, "B H L d_k"], value: Float[ndarray, "B H L d_v"]) -> KeyValues:
        """Store the keys and values of the next positions, and return all stored keys and values.

        Args:
            key: Keys of the next positions.
            value: Values of the next positions.

        Returns:
            The keys and values of all stored positions.

        Raises:
            ValueError: If the new positions exceed the capacity.
        """
        check_capacity(self.length, key.shape[2], self.key.shape[2])
        new = slice(self.length, self.length + key.shape[2])
        self.key[:, :, new], self.value[:, :, new] = key, value
        self.length = new.stop
        return KeyValues(self.key[:, :, : self.length], self.value[:, :, : self.length])

    def reorder(self, rows: Int[ndarray, " B"]) -> None:
        """Replace row i of the buffers with row ``rows[i]``.

        Args:
            rows: For each row of the result, the index of the row to copy.
        """
        self.key[:, :, : self.length] = self.key[rows, :, : self.length]
        self.value[:, :, : self.length] = self.value[rows, :, : self.length]


class MultiHeadAttention:
    """Multi-head attention: several attention heads in parallel, each with its own projections (section 3.2.2).

    ``MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O`` with ``head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)``.

    Args:
        config: Model configuration, which defines the number and size of the heads.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.

    Taps:
        query, key, value: Projected inputs, per head.
        scores, weights, context: Taps of ``scaled_dot_product_attention``.
        output: Output of the layer.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.num_heads = config.num_heads
        self.scale_scores = config.scale_scores
        bias = config.attention_bias
        self.query_proj = Linear(config.d_model, config.num_heads * config.d_k, bias=bias, dtype=dtype)
        self.key_proj = Linear(config.d_model, config.num_heads * config.d_k, bias=bias, dtype=dtype)
        self.value_proj = Linear(config.d_model, config.num_heads * config.d_v, bias=bias, dtype=dtype)
        self.output_proj = Linear(config.num_heads * config.d_v, config.d_model, bias=bias, dtype=dtype)
        self.dropout = Dropout(config.dropout.attention)
        self.attend = scaled_dot_product_attention  # fast.accelerate may replace this function

    def __call__(
        self,
        query: Float[ndarray, "B L d_model"],
        memory: Float[ndarray, "B M d_model"] | KeyValues,
        mask: Bool[ndarray, "#N #H #L #K"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
        past: KeyValueCache | None = None,
        bias: Float[ndarray, "#N #H #L #K"] | None = None,
    ) -> Float[ndarray, "B L d_model"]:
        """Attend from each query position to the memory positions, and return one vector per query position.

        Args:
            query: One vector per query position.
            memory: One vector per memory position. In self-attention, this is the same array as ``query``. To reuse
                keys and values between calls, pass the result of ``project``.
            mask: True if a query position may attend to a memory position. If None, no mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            rng: Random generator for dropout. If None, dropout is disabled (inference).
            past: Cache of the keys and values of earlier positions. The method appends the keys and values of
                ``memory`` to the cache, and attends to all positions in the cache. If None, the method attends only to
                ``memory``.
            bias: Numbers that are added to the scores, such as a relative position bias. If None, no bias is added.
        """
        shape = query.shape
        if isinstance(memory, KeyValues):  # all hypotheses of a source sequence share one memory
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
        dropout = partial(self.dropout, rng=rng, tap=tap, name="weights")
        if not self.scale_scores:
            q = q * math.sqrt(q.shape[-1])  # cancels the division in equation (1)
        context = self.attend(q, k, v, mask, dropout, tap, bias)
        return tap("output", self.output_proj(merge_heads(context)).reshape(shape))

    def project(self, memory: Float[ndarray, "B M d_model"]) -> KeyValues:
        """Return the keys and values of the memory positions, for use in multiple calls.

        Args:
            memory: One vector per memory position.
        """
        return KeyValues(
            split_heads(self.key_proj(memory), self.num_heads), split_heads(self.value_proj(memory), self.num_heads)
        )
