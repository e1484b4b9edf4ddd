"""Optimized functions and layers, which create fewer temporary arrays and compute sums using BLAS.

``accelerate`` replaces layers and functions of a model. The modules ``training`` and ``search`` use the optimized loss,
optimizer, and ``top`` if ``model.fast`` is True. Up to rounding, this code and the unoptimized code return the same
results (see ``tests/test_fast.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.attention import MultiHeadAttention
from reference_numpy.embedding import OutputProjection
from reference_numpy.feed_forward import PositionwiseFeedForward
from reference_numpy.functional import UNDERFLOW, relu_backward
from reference_numpy.layers import LayerNorm, Linear
from reference_numpy.optimizer import Adam
from transformer_spec.checks import check_attention, check_attention_bias, check_attention_mask, to_array
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap

QUERY_BLOCK = 256  # number of queries to process at once, so that memory use grows linearly with the length
PIECE = 2**15  # number of parameter elements to update at a time; small enough for the CPU cache


def sum_last(x: Float[ndarray, "*axes n"]) -> Float[ndarray, "*axes 1"]:
    """Sum over the last axis using a dot product with ones, because BLAS is faster than ``np.sum``."""
    return np.vecdot(x, _ones(x.shape[-1], x.dtype))[..., None]


def sum_rows(rows: Float[ndarray, "N n"]) -> Float[ndarray, " n"]:
    """Sum over the first axis using a matmul with ones."""
    return _ones(len(rows), rows.dtype) @ rows


@lru_cache(maxsize=64)
def _ones(length, dtype):
    return np.ones(length, dtype)


def _rows(x):
    x = to_array("x", x)
    return x.reshape(-1, x.shape[-1])


# Layers.


class FastLinear(Linear):
    """Linear layer that multiplies all rows in one matmul, instead of one matmul per sequence."""

    def __call__(self, x: Float[ndarray, "*axes d_in"]) -> Float[ndarray, "*axes d_out"]:
        """Return ``x W + b``, applied to the last axis of ``x``."""
        y = _rows(x) @ self.kernel
        if self.bias is not None:
            y += self.bias
        return y.reshape(*np.shape(x)[:-1], y.shape[-1])

    def backward(
        self, x: Float[ndarray, "*axes d_in"], dy: Float[ndarray, "*axes d_out"], tap: Tap
    ) -> Float[ndarray, "*axes d_in"]:
        """Return the gradient with respect to ``x``. The tap receives the gradients with respect to the parameters."""
        rows, drows = _rows(x), _rows(dy)
        tap("kernel", rows.T @ drows)
        if self.bias is not None:
            tap("bias", sum_rows(drows))
        return (drows @ self.kernel.T).reshape(x.shape)


class FastOutputProjection(OutputProjection):
    """Output projection that multiplies all rows in one matmul.

    The gradient of a tied matrix gets the same memory layout as the matrix.
    """

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L V"]:
        """Return the logits of each position."""
        logits = _rows(x) @ self._matrix
        if self.bias is not None:
            logits += self.bias
        return logits.reshape(*np.shape(x)[:-1], logits.shape[-1])

    def backward(
        self, x: Float[ndarray, "B L d_model"], dlogits: Float[ndarray, "B L V"], tap: Tap
    ) -> tuple[Float[ndarray, "B L d_model"], Float[ndarray, "V d_model"] | None]:
        """Return the gradients with respect to ``x`` and to a tied embedding matrix (None if it is not tied).

        The tap receives the gradients with respect to the bias and, if the projection is not tied, the kernel.
        """
        rows, drows = _rows(x), _rows(dlogits)
        dx, dtable = (drows @ self._matrix.T).reshape(x.shape), None
        if self.bias is not None:
            tap("bias", sum_rows(drows))
        if self.kernel is None:
            dtable = drows.T @ rows
        else:
            tap("kernel", rows.T @ drows)
        return dx, dtable


class FastLayerNorm(LayerNorm):
    """Layer normalization that computes in place."""

    def __call__(self, x: Float[ndarray, "*axes d_model"]) -> Float[ndarray, "*axes d_model"]:
        """Normalize each position of ``x``."""
        x = x.astype(np.result_type(x, self.scale), copy=False)  # the in-place operations keep this dtype
        y = x - sum_last(x) / x.shape[-1]
        y /= self._deviation(y)[0]
        y *= self.scale
        y += self.bias
        return y

    def backward(
        self, x: Float[ndarray, "*axes d_model"], dy: Float[ndarray, "*axes d_model"], tap: Tap
    ) -> Float[ndarray, "*axes d_model"]:
        """Return the gradient with respect to ``x``. The tap receives the gradients with respect to the parameters."""
        d_model, x = x.shape[-1], x.astype(np.result_type(x, self.scale), copy=False)
        normed = x - sum_last(x) / d_model
        sigma, slope = self._deviation(normed)
        normed /= sigma
        product = dy * normed
        tap("scale", sum_rows(_rows(product)))
        tap("bias", sum_rows(_rows(dy)))
        dx = dy * self.scale
        dx -= sum_last(dx) / d_model
        normed *= np.vecdot(product, self.scale)[..., None] * (slope / d_model)
        dx -= normed
        dx /= sigma
        return dx

    def _deviation(self, centered):
        """Return sigma and the slope of sigma, as defined in ``functional.layer_norm_backward``."""
        d_model, squares = centered.shape[-1], np.vecdot(centered, centered)[..., None]
        if self.kind == "standard":
            return np.sqrt(squares / d_model + self.epsilon), 1.0
        std = np.sqrt(squares / (d_model - 1))
        sigma = std + self.epsilon
        std[std == 0.0] = 1.0
        return sigma, sigma / std * (d_model / (d_model - 1))


class FastFeedForward(PositionwiseFeedForward):
    """Feed-forward network that computes the gradient of ReLU from the output of ReLU.

    Therefore, the backward pass doesn't recompute the input of ReLU.
    """

    def activation_backward(
        self, x: Float[ndarray, "B L d_model"], inner: Float[ndarray, "B L d_ff"], dinner: Float[ndarray, "B L d_ff"]
    ) -> Float[ndarray, "B L d_ff"]:
        """Return the gradient with respect to the input of the activation."""
        if self.activation == "relu":
            return relu_backward(inner, dinner)
        return super().activation_backward(x, inner, dinner)


FAST = {
    Linear: FastLinear,
    OutputProjection: FastOutputProjection,
    LayerNorm: FastLayerNorm,
    PositionwiseFeedForward: FastFeedForward,
}


def accelerate(model: Any) -> None:
    """Replace layers and functions of a newly constructed model with faster ones that compute the same results."""
    if type(model) in FAST:
        model.__class__ = FAST[type(model)]
    if isinstance(model, MultiHeadAttention):
        model.attend = attend
    for value in vars(model).values():
        for part in value if isinstance(value, list) else [value]:
            if callable(part):  # only blocks and layers are callable
                accelerate(part)


# Attention.


@UNDERFLOW
def attend(
    query: Float[ndarray, "B H L d_k"],
    key: Float[ndarray, "B H M d_k"],
    value: Float[ndarray, "B H M d_v"],
    mask: Bool[ndarray, "#B #H #L #M"] | None = None,
    dropout: Callable[[ndarray], ndarray] | None = None,
    tap: Tap = no_tap,
    bias: Float[ndarray, "#B #H #L #M"] | None = None,
) -> Float[ndarray, "B H L d_v"]:
    """Compute ``scaled_dot_product_attention`` in place. Without taps, process long inputs in blocks of queries."""
    check_attention(query.shape, key.shape, value.shape)
    if mask is not None:
        check_attention_mask(mask.shape, mask.dtype.name, query.shape, key.shape)
    if bias is not None:
        check_attention_bias(bias.shape, query.shape, key.shape)
    if tap is no_tap and query.shape[2] > QUERY_BLOCK:
        return _attend_in_blocks(query, key, value, mask, dropout, bias)
    scores = query @ key.mT
    scores *= 1.0 / math.sqrt(query.shape[-1])
    if bias is not None:
        scores += bias
    scores = tap("scores", scores)
    weights = tap("weights", softmax(scores if tap is no_tap else scores.copy(), mask))
    if dropout is not None:
        weights = dropout(weights)
    return tap("context", weights @ value)


def _attend_in_blocks(query, key, value, mask, dropout, bias):
    """Compute attention for one head and one block of queries at a time.

    The blocks are in the order in which dropout samples masks.
    """
    batch, heads, length, _ = query.shape
    context = np.empty((batch, heads, length, value.shape[3]), value.dtype)
    masks, biases = (None if x is None else np.broadcast_to(x, (batch, heads, *x.shape[-2:])) for x in (mask, bias))
    for b, h, start in itertools.product(range(batch), range(heads), range(0, length, QUERY_BLOCK)):
        head = slice(b, b + 1), slice(h, h + 1)
        rows = *head, slice(start, start + QUERY_BLOCK)
        allowed, added = (  # masks and biases may broadcast over queries
            None if x is None else x[rows if x.shape[2] > 1 else head] for x in (masks, biases)
        )
        context[rows] = attend(query[rows], key[head], value[head], allowed, dropout, bias=added)
    return context


def softmax(
    scores: Float[ndarray, "*axes M"], mask: Bool[ndarray, "*#axes #M"] | None = None
) -> Float[ndarray, "*axes M"]:
    """Compute ``masked_softmax``, overwriting the scores."""
    if mask is not None:  # fmin replaces NaN with infinity and takes 75% less time than np.where
        infinity = scores.dtype.type(inf)
        np.fmin(scores, np.where(mask, infinity, -infinity), out=scores)
    with np.errstate(invalid="ignore"):  # infinity - infinity is NaN
        scores -= scores.max(axis=-1, keepdims=True, initial=np.finfo(scores.dtype).min)
    np.exp(scores, out=scores)
    total = sum_last(scores)
    np.maximum(total, 1.0, out=total)
    scores /= total
    return scores


# Training.


def by_sentence(
    loss: Callable[..., tuple[Any, Any]],
    loss_backward: Callable[..., ndarray],
    logits: Float[ndarray, "B T V"],
    labels: Int[ndarray, "B T"],
    config: TransformerConfig,
) -> tuple[tuple[Any, Any], Float[ndarray, "B T V"]]:
    """Return the summed loss, the number of tokens, and the gradient with respect to the logits, stored in ``logits``.

    The function processes one sequence at a time to save memory, because the arrays that have a vocabulary axis are the
    largest.
    """
    total, tokens = logits.dtype.type(0), 0
    for i in range(len(labels)):
        sentence = slice(i, i + 1)
        part_total, part_tokens = loss(logits[sentence], labels[sentence], config)
        total, tokens = total + part_total, tokens + part_tokens
        logits[sentence] = loss_backward(logits[sentence], labels[sentence], config)
    return (total, tokens), logits


class FastAdam(Adam):
    """Adam that updates a few rows of a parameter at a time, so that these rows stay in the CPU cache."""

    def update(
        self, gradient: Mapping[str, ndarray], scale: float, learning_rate: float, corrections: tuple[float, float]
    ) -> None:
        """Take a step: update parameters and moments in place, a few rows at a time."""
        self.check(gradient)
        settings = self.settings
        correction1, correction2 = corrections
        for name, parameter in self.parameters.items():
            moments = self.first_moment[name], self.second_moment[name]
            for theta, g, m, v in _pieces(parameter, gradient[name], *moments):
                g = scale * g
                m += (1.0 - settings.beta1) * (g - m)
                v += (1.0 - settings.beta2) * (g * g - v)
                m_hat = m / correction1
                v_hat = v / correction2
                theta -= learning_rate * m_hat / (np.sqrt(v_hat) + settings.epsilon)


def _pieces(*arrays: ndarray) -> Iterator[list[ndarray]]:
    """Split arrays of the same shape into groups of rows. For each group, yield a list with its part of each array."""
    rows = max(1, PIECE * len(arrays[0]) // arrays[0].size)
    for start in range(0, len(arrays[0]), rows):
        yield [array[start : start + rows] for array in arrays]


# Search.


def top(values: Float[ndarray, "B N"], count: int) -> tuple[Float[ndarray, "B K"], Int[ndarray, "B K"]]:
    """Return the largest values of each row and their indices.

    Unlike ``search.top``, this function doesn't sort all values.
    """
    values = np.where(np.isnan(values), inf, values)
    if values.shape[1] > 8 * count:
        large = [np.flatnonzero(row >= np.partition(row, -count)[-count]) for row in values]
        index = np.stack([at[np.argsort(-x[at], kind="stable")[:count]] for x, at in zip(values, large, strict=True)])
    else:
        index = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(values, index, -1), index
