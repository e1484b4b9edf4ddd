"""The backward pass of the functions that every framework ships, beside ``functional``, in its order.

``of_x`` is the gradient of the loss with regard to ``x``. Each function takes what its forward took or returned, and
the gradient of what it returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy import ndarray

from reference_numpy.functional import _erf, gelu, gelu_tanh, relu, sum_last, swish
from reference_numpy.shapes import Float, Int


def linear_backward(
    x: Float[ndarray, "*axes d_in"], kernel: Float[ndarray, "d_in d_out"], of_y: Float[ndarray, "*axes d_out"]
) -> tuple[Float[ndarray, "*axes d_in"], Float[ndarray, "d_in d_out"], Float[ndarray, " d_out"]]:
    """Return the gradients of ``x``, ``W`` and ``b``: ``dy W^T``, ``x^T dy`` and the sum of ``dy`` over all rows."""
    rows, of_rows = _rows(x), _rows(of_y)
    # The gradient of a transposed table lies in memory as the table does.
    of_kernel = rows.T @ of_rows if kernel.flags.c_contiguous else (of_rows.T @ rows).T
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
