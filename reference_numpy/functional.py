"""The functions that every framework ships, written out: linear, softmax, layer norm, activations, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def linear(
    x: Float[ndarray, "*axes d_in"], kernel: Float[ndarray, "d_in d_out"], bias: Float[ndarray, " d_out"] | None = None
) -> Float[ndarray, "*axes d_out"]:
    """Multiply the last axis by a matrix and add a bias: ``x W + b``."""
    y = x.reshape(-1, x.shape[-1]) @ kernel  # one matrix product, whatever the leading axes
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], kernel.shape[-1])


def masked_softmax(
    scores: Float[ndarray, "*axes M"], mask: Bool[ndarray, "*#axes #M"] | None = None
) -> Float[ndarray, "*axes M"]:
    """Turn scores into weights that sum to one over the allowed keys, and to zero where none is allowed."""
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    largest[np.isneginf(largest)] = 0.0  # a row of -inf would otherwise be -inf - -inf, NaN
    weights = scores - largest
    np.exp(weights, out=weights)
    total = weights.sum(axis=-1, keepdims=True)
    total[total == 0.0] = 1.0  # nothing allowed: 0 / 1
    weights /= total
    return weights


def log_softmax(logits: Float[ndarray, "*axes V"]) -> Float[ndarray, "*axes V"]:
    """Return the logarithms of the probabilities, without overflow."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def layer_norm(
    x: Float[ndarray, "*axes d_model"],
    scale: Float[ndarray, " d_model"],
    bias: Float[ndarray, " d_model"],
    epsilon: float,
) -> Float[ndarray, "*axes d_model"]:
    """Normalise the last axis by the biased variance about the mean (Ba et al., 2016, equations 3 and 4).

    The variance is taken in two passes: the mean of squares minus the square of the mean loses every digit when
    the mean is large.
    """
    y = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(y).mean(axis=-1, keepdims=True)
    y /= np.sqrt(variance + epsilon)
    y *= scale
    y += bias
    return y


def annotated_layer_norm(
    x: Float[ndarray, "*axes d_model"],
    scale: Float[ndarray, " d_model"],
    bias: Float[ndarray, " d_model"],
    epsilon: float,
) -> Float[ndarray, "*axes d_model"]:
    """Normalise as the Annotated Transformer does: unbiased standard deviation, epsilon added outside the root."""
    y = x - x.mean(axis=-1, keepdims=True)
    y /= x.std(axis=-1, ddof=1, keepdims=True) + epsilon
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
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def swish(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return ``x sigmoid(x)``, also called SiLU."""
    return x * (0.5 * (1.0 + np.tanh(0.5 * x)))  # the sigmoid, in the form that cannot overflow


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
    return np.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype, copy=False)
