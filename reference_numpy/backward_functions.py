"""The backward pass of the functions that every framework ships: those of ``functional``, attention and the loss.

``of_x`` is the gradient of the loss with regard to ``x``. Each function takes what its forward took or returned, and
the gradient of what it returned.

B batch, H heads, L query length, M memory length, T target length, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy import ndarray

from reference_numpy.functional import _erf, gelu, gelu_tanh, masked_softmax, relu, sum_last, swish
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float, Int
from transformer_spec.taps import Tap, no_tap


def linear_backward(
    x: Float[ndarray, "*axes d_in"],
    kernel: Float[ndarray, "d_in d_out"],
    of_y: Float[ndarray, "*axes d_out"],
    out: Float[ndarray, "d_in d_out"] | None = None,
) -> tuple[Float[ndarray, "*axes d_in"], Float[ndarray, "d_in d_out"], Float[ndarray, " d_out"]]:
    """Return the gradients of ``x``, ``W`` and ``b``: ``dy W^T``, ``x^T dy`` and the sum of ``dy`` over all rows.

    That of ``W`` goes to ``out``; None is a new array.
    """
    rows, of_rows = _rows(x), _rows(of_y)
    if kernel.flags.c_contiguous:
        of_kernel = np.matmul(rows.T, of_rows, out=out)
    else:  # the gradient of a transposed table lies in memory as the table does
        of_kernel = np.matmul(of_rows.T, rows, out=None if out is None else out.T).T
    return (of_rows @ kernel.T).reshape(x.shape), of_kernel, _sum_rows(of_rows)


def masked_softmax_backward(
    weights: Float[ndarray, "*axes M"], of_weights: Float[ndarray, "*axes M"]
) -> Float[ndarray, "*axes M"]:
    """Return the gradient of the scores, ``w_i (dw_i - sum_j w_j dw_j)``: zero where masked, as the weight is zero."""
    of_scores = of_weights - np.vecdot(weights, of_weights)[..., None]
    of_scores *= weights
    return of_scores


def layer_norm_backward(
    x: Float[ndarray, "*axes d_model"],
    scale: Float[ndarray, " d_model"],
    epsilon: float,
    of_y: Float[ndarray, "*axes d_model"],
    kind: str = "standard",
) -> tuple[Float[ndarray, "*axes d_model"], Float[ndarray, " d_model"], Float[ndarray, " d_model"]]:
    """Return the gradients of ``x``, scale and bias.

    With ``n = (x - mean) / sigma`` and ``y = n scale + bias``: ``dx = (dn - mean(dn) - n share sum(n dn)) / sigma``.
    The last two terms are what ``x`` does to its own mean and to its own ``sigma``, as ``dsigma = share sum(n dx)``.

    The share is ``1 / d_model``, or, for kind ``annotated``, ``sigma / ((d_model - 1) std)``: there ``sigma`` is the
    unbiased std plus epsilon, whose derivative is taken as zero at a std of zero.
    """
    d_model = x.shape[-1]
    normed = x - sum_last(x) / d_model
    squares = np.vecdot(normed, normed)[..., None]
    if kind == "annotated":
        std = np.sqrt(squares / (d_model - 1))
        sigma = std + epsilon
        share = sigma / ((d_model - 1) * np.where(std == 0.0, 1.0, std).astype(x.dtype, copy=False))
    else:
        sigma = np.sqrt(squares / d_model + epsilon)
        share = 1.0 / d_model
    normed /= sigma
    product = of_y * normed
    of_x = of_y * scale  # first that of ``n``
    of_x -= sum_last(of_x) / d_model
    normed *= np.vecdot(product, scale)[..., None] * share  # as sum(n dn) = sum(n dy scale)
    of_x -= normed
    of_x /= sigma
    return of_x, _sum_rows(_rows(product)), _sum_rows(_rows(of_y))


def relu_backward(x: Float[ndarray, "*axes"], of_y: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return the gradient of ``x``: that of ``y`` where ``x`` is positive. The sign of ``y`` tells as much."""
    return of_y * (x > 0.0)


def gelu_backward(x: Float[ndarray, "*axes"], of_y: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return the gradient of ``x``: ``Phi(x) + x phi(x)`` times that of ``y``."""
    cumulative = 0.5 * (1.0 + _erf(x * math.sqrt(0.5)))
    density = np.exp(-0.5 * np.square(x)) * (1.0 / math.sqrt(2.0 * math.pi))
    return (of_y * (cumulative + x * density)).astype(x.dtype, copy=False)


def gelu_tanh_backward(x: Float[ndarray, "*axes"], of_y: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return the gradient of ``x``, the tanh being ``t(u)`` with ``t' = (1 - t^2) u'``."""
    slope = math.sqrt(2.0 / math.pi)
    t = np.tanh(slope * (x + 0.044715 * x * np.square(x)))
    of_t = 0.5 * x * (1.0 - np.square(t)) * (slope * (1.0 + 3 * 0.044715 * np.square(x)))
    return of_y * (0.5 * (1.0 + t) + of_t)


def swish_backward(x: Float[ndarray, "*axes"], of_y: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return the gradient of ``x``: ``s + x s (1 - s)`` times that of ``y``, where ``s`` is the sigmoid."""
    s = np.tanh(0.5 * x)
    s += 1.0
    s *= 0.5
    slope = 1.0 - s
    slope *= x
    slope += 1.0
    slope *= s
    slope *= of_y
    return slope


ACTIVATIONS_BACKWARD: dict[Callable[[ndarray], ndarray], Callable[[ndarray, ndarray], ndarray]] = {
    relu: relu_backward,
    gelu: gelu_backward,
    gelu_tanh: gelu_tanh_backward,
    swish: swish_backward,
}


def lookup_backward(
    ids: Int[ndarray, "B L"], of_vectors: Float[ndarray, "B L d_model"], of_table: Float[ndarray, "V d_model"]
) -> None:
    """Add to the gradient of a table: to each row, what comes from the places where its token stands."""
    order = np.argsort(ids, axis=None, kind="stable")  # equal tokens side by side: one sum each, far faster than add.at
    tokens, starts = np.unique(ids.reshape(-1)[order], return_index=True)
    of_table[tokens] += np.add.reduceat(_rows(of_vectors)[order], starts, axis=0)


def _rows(x: ndarray) -> ndarray:
    return x.reshape(-1, x.shape[-1])


def _sum_rows(rows: ndarray) -> ndarray:
    return np.ones(len(rows), rows.dtype) @ rows  # BLAS: faster than sum(0), and in several partial sums


def scaled_dot_product_attention_backward(
    query: Float[ndarray, "B H L d_k"],
    key: Float[ndarray, "B H M d_k"],
    value: Float[ndarray, "B H M d_v"],
    weights: Float[ndarray, "B H L M"],
    of_context: Float[ndarray, "B H L d_v"],
    dropout: Callable[[ndarray], ndarray] | None = None,
    tap: Tap = no_tap,
) -> tuple[Float[ndarray, "B H L d_k"], Float[ndarray, "B H M d_k"], Float[ndarray, "B H M d_v"]]:
    """Return the gradients of query, key and value in ``softmax(Q K^T / sqrt(d_k)) V``.

    Args:
        query: As in the forward pass.
        key: As in the forward pass.
        value: As in the forward pass.
        weights: After softmax, before dropout; zero where masked, so the mask is not needed again.
        of_context: The gradient of the result.
        dropout: What was applied to the weights; being linear, it is applied to their gradient too.
        tap: Receives the gradient at each of the forward's taps and returns the one to go on with.
    """
    of_context = tap("context", of_context)
    thinned = weights if dropout is None else dropout(weights)
    of_value = thinned.mT @ of_context
    of_weights = of_context @ value.mT  # [B, H, L, M]
    of_weights = tap("weights", of_weights if dropout is None else dropout(of_weights))
    of_scores = tap("scores", masked_softmax_backward(weights, of_weights))  # [B, H, L, M]
    of_query, of_key = of_scores @ key, of_scores.mT @ query
    for gradient in (of_query, of_key):
        gradient *= 1.0 / math.sqrt(query.shape[-1])
    return of_query, of_key, of_value


def cross_entropy_backward(
    logits: Float[ndarray, "B T V"], labels: Int[ndarray, "B T"], config: TransformerConfig
) -> Float[ndarray, "B T V"]:
    """Return the gradient of the summed ``cross_entropy`` at the logits: what was predicted minus what was wanted.

    As what is wanted sums to one, this is all that is left of the logarithm, the softmax and the smoothing.

    Arguments as in ``cross_entropy``.
    """
    kind, smoothing = config.label_smoothing_kind, config.label_smoothing
    others = {"uniform": 0, "off_target": 1, "off_target_and_pad": 2}[kind]
    share = smoothing / (config.target_vocab_size - others) if smoothing else 0.0
    wanted = np.full(logits.shape, share, logits.dtype)
    if kind == "off_target_and_pad":
        wanted[..., config.pad_id] = 0.0
    right = 1.0 - smoothing + (share if kind == "uniform" else 0.0)
    np.put_along_axis(wanted, labels[..., None], right, -1)
    of_logits = masked_softmax(logits) - wanted
    of_logits[labels == config.pad_id] = 0.0
    return of_logits
