"""The functions that every framework ships, written out: linear, softmax, layer norm, activations, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy import ndarray

from transformer_spec.shapes import Bool, Float

FEW_ROWS = 32  # for up to so many, a transposed matrix is better the left one of a product: 1.3 to 1.8 times as fast


def linear(
    x: Float[ndarray, "*axes d_in"], kernel: Float[ndarray, "d_in d_out"], bias: Float[ndarray, " d_out"] | None = None
) -> Float[ndarray, "*axes d_out"]:
    """Multiply the last axis by a matrix and add a bias: ``x W + b``."""
    rows = x.reshape(-1, x.shape[-1])  # one matrix product, whatever the leading axes
    if len(rows) <= FEW_ROWS and not kernel.flags.c_contiguous:  # a transposed table, which BLAS reads badly for so few
        y = np.ascontiguousarray((kernel.T @ rows.T).T)
    else:
        y = rows @ kernel
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], kernel.shape[-1])


def masked_softmax(
    scores: Float[ndarray, "*axes M"],
    mask: Bool[ndarray, "*#axes #M"] | None = None,
    out: Float[ndarray, "*axes M"] | None = None,
) -> Float[ndarray, "*axes M"]:
    """Turn scores into weights that sum to one over the allowed keys, and to zero where none is allowed.

    Args:
        scores: How well each key answers.
        mask: True where a key is allowed. None allows all.
        out: Where the weights go, which may be ``scores`` itself; None is a new array.
    """
    if mask is not None:  # the smaller of a score and infinity is the score; np.where takes four times as long
        infinity = scores.dtype.type(np.inf)
        scores = out = np.fmin(scores, np.where(mask, infinity, -infinity), out=out)
    lowest = np.finfo(scores.dtype).min  # a row of -inf would otherwise be -inf - -inf, NaN
    largest = np.fmax.reduce(scores, axis=-1, keepdims=True, initial=lowest)  # max minds NaN, and takes twice as long
    with np.errstate(invalid="ignore"):  # inf - inf: what is not a number stays so, without a warning
        weights = np.subtract(scores, largest, out=out)
    np.exp(weights, out=weights)
    total = sum_last(weights)
    np.maximum(total, 1.0, out=total)  # the likeliest has exp(0) = 1; nothing allowed: 0 / 1
    weights /= total
    return weights


def log_softmax(logits: Float[ndarray, "*axes V"]) -> Float[ndarray, "*axes V"]:
    """Return the logarithms of the probabilities, without overflow."""
    shifted = logits - np.fmax.reduce(logits, axis=-1, keepdims=True)
    shifted -= np.log(sum_last(np.exp(shifted)))
    return shifted


def sum_last(x: Float[ndarray, "*axes n"]) -> Float[ndarray, "*axes 1"]:
    """Sum up the last axis, which stays with length one: as a product with ones, which BLAS does far faster."""
    return np.vecdot(x, _ones(x.shape[-1], x.dtype))[..., None]


@lru_cache(maxsize=64)
def _ones(length, dtype):
    return np.ones(length, dtype)


def layer_norm(
    x: Float[ndarray, "*axes d_model"],
    scale: Float[ndarray, " d_model"],
    bias: Float[ndarray, " d_model"],
    epsilon: float,
    kind: str = "standard",
) -> Float[ndarray, "*axes d_model"]:
    """Normalise the last axis by the biased variance about the mean (Ba et al., 2016, equations 3 and 4).

    Kind ``annotated`` divides as the Annotated Transformer does: by the unbiased standard deviation, with epsilon
    added outside the root. The variance is taken in two passes: the mean of squares minus the square of the mean
    loses every digit when the mean is large.
    """
    d_model = x.shape[-1]
    y = x - sum_last(x) / d_model
    squares = np.vecdot(y, y)[..., None]
    y /= np.sqrt(squares / (d_model - 1)) + epsilon if kind == "annotated" else np.sqrt(squares / d_model + epsilon)
    y *= scale
    y += bias
    return y


def relu(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return ``max(0, x)``, equation (2)."""
    return np.maximum(x, 0.0)


_erf = np.vectorize(math.erf, otypes=[np.float64])  # NumPy has no erf


def gelu(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return ``x Phi(x)``, with the normal distribution's exact Phi (Hendrycks and Gimpel, 2016)."""
    return (x * (0.5 * (1.0 + _erf(x * math.sqrt(0.5))))).astype(x.dtype)


def gelu_tanh(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return the tanh approximation of ``gelu``, up to 5e-4 away from it."""
    y = np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * np.square(x)))  # x**3 would be many times as slow
    y += 1.0
    y *= x
    y *= 0.5
    return y


def swish(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return ``x sigmoid(x)``, also called SiLU."""
    y = 0.5 * x
    np.tanh(y, out=y)  # the sigmoid is 0.5 (1 + tanh(x / 2)), a form that cannot overflow
    y += 1.0
    y *= x
    y *= 0.5
    return y


ACTIVATIONS: dict[str, Callable[[ndarray], ndarray]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swish": swish,
}


def draw_keep(shape: tuple[int, ...], rate: float, rng: np.random.Generator) -> Bool[ndarray, "*axes"]:
    """Choose what dropout keeps: each element with probability ``1 - rate``."""
    return rng.random(shape, dtype=np.float32) >= rate


def dropout(x: Float[ndarray, "*axes"], keep: Bool[ndarray, "*axes"], rate: float) -> Float[ndarray, "*axes"]:
    """Set what is not kept to zero and scale the rest so that the mean stays (section 5.4)."""
    y = x / (1.0 - rate)
    y *= keep
    return y
