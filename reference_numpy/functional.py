"""The functions from which the layers are built, each followed by its backward pass.

``dy`` is the gradient of the loss with respect to ``y``. A backward function takes the inputs of the forward function
(or only its result, if that is sufficient) and the gradient with respect to the result. It returns the gradients with
respect to the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy import ndarray

from transformer_spec.shapes import Bool, Float


def linear(
    x: Float[ndarray, "*axes d_in"], kernel: Float[ndarray, "d_in d_out"], bias: Float[ndarray, " d_out"] | None = None
) -> Float[ndarray, "*axes d_out"]:
    """Return ``x W + b``, applied to the last axis of ``x``."""
    y = x @ kernel
    return y if bias is None else y + bias


def linear_backward(
    x: Float[ndarray, "*axes d_in"], kernel: Float[ndarray, "d_in d_out"], dy: Float[ndarray, "*axes d_out"]
) -> tuple[Float[ndarray, "*axes d_in"], Float[ndarray, "d_in d_out"], Float[ndarray, " d_out"]]:
    """Return the gradients with respect to ``x``, ``W``, and ``b``: ``dy W^T``, ``x^T dy``, and the sum of ``dy``."""
    rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return dy @ kernel.T, rows.T @ drows, drows.sum(axis=0)


UNDERFLOW = np.errstate(under="ignore")  # decorator that allows exp of a large negative number to underflow to 0


@UNDERFLOW
def masked_softmax(
    scores: Float[ndarray, "*axes M"], mask: Bool[ndarray, "*#axes #M"] | None = None
) -> Float[ndarray, "*axes M"]:
    """Return the softmax over the allowed keys. If no key is allowed, all weights are zero.

    Args:
        scores: Similarity of each key to the query.
        mask: True if a key is allowed. If None, every key is allowed.
    """
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True, initial=np.finfo(scores.dtype).min)  # finite even if no key is allowed
    weights = np.exp(scores - largest)
    # The sum is at least exp(0) = 1. If no key is allowed, the sum is 0, and the result is 0, too.
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1.0)


def masked_softmax_backward(
    weights: Float[ndarray, "*axes M"], dweights: Float[ndarray, "*axes M"]
) -> Float[ndarray, "*axes M"]:
    """Return the gradient with respect to the scores, ``w_i (dw_i - sum_j w_j dw_j)``.

    The gradient is zero for masked keys.
    """
    return weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))


@UNDERFLOW
def log_softmax(logits: Float[ndarray, "*axes V"]) -> Float[ndarray, "*axes V"]:
    """Return the logarithms of the softmax probabilities, computed without overflow."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def layer_norm(
    x: Float[ndarray, "*axes d_model"],
    scale: Float[ndarray, " d_model"],
    bias: Float[ndarray, " d_model"],
    epsilon: float,
    kind: str = "standard",
) -> Float[ndarray, "*axes d_model"]:
    """Normalize the last axis with its mean and biased variance (Ba et al., 2016, equations 3 and 4).

    If ``kind`` is ``annotated``, the divisor is the unbiased standard deviation plus epsilon, as in the Annotated
    Transformer. The variance is computed in two passes, because the mean of squares minus the square of the mean loses
    all digits if the mean is large.
    """
    centered = x - x.mean(axis=-1, keepdims=True)
    sigma, _ = _deviation(centered, epsilon, kind)
    return centered / sigma * scale + bias


def layer_norm_backward(
    x: Float[ndarray, "*axes d_model"],
    scale: Float[ndarray, " d_model"],
    epsilon: float,
    dy: Float[ndarray, "*axes d_model"],
    kind: str = "standard",
) -> tuple[Float[ndarray, "*axes d_model"], Float[ndarray, " d_model"], Float[ndarray, " d_model"]]:
    """Return the gradients with respect to ``x``, the scale, and the bias.

    If ``n = (x - mean) / sigma`` and ``y = n scale + bias``, then
    ``dx = (dn - mean(dn) - n slope mean(n dn)) / sigma``. The second term is the effect of ``x`` on the mean. The
    third term is the effect of ``x`` on ``sigma``, because ``dsigma = slope mean(n dx)``.
    """
    centered = x - x.mean(axis=-1, keepdims=True)
    sigma, slope = _deviation(centered, epsilon, kind)
    n, dn = centered / sigma, dy * scale
    dx = (dn - dn.mean(axis=-1, keepdims=True) - n * slope * (n * dn).mean(axis=-1, keepdims=True)) / sigma
    rows = tuple(range(x.ndim - 1))
    return dx, (dy * n).sum(axis=rows), dy.sum(axis=rows)


def rms_norm(
    x: Float[ndarray, "*axes d_model"], scale: Float[ndarray, " d_model"], epsilon: float
) -> Float[ndarray, "*axes d_model"]:
    """Divide the last axis by its root mean square, and multiply it by the scale (Zhang and Sennrich, 2019).

    Unlike a layer norm, the function neither subtracts the mean nor adds a bias.
    """
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon) * scale


def rms_norm_backward(
    x: Float[ndarray, "*axes d_model"],
    scale: Float[ndarray, " d_model"],
    epsilon: float,
    dy: Float[ndarray, "*axes d_model"],
) -> tuple[Float[ndarray, "*axes d_model"], Float[ndarray, " d_model"]]:
    """Return the gradients with respect to ``x`` and the scale.

    If ``n = x / sigma`` and ``y = n scale``, then ``dx = (dn - n mean(n dn)) / sigma``.
    """
    sigma = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon)
    n, dn = x / sigma, dy * scale
    dx = (dn - n * (n * dn).mean(axis=-1, keepdims=True)) / sigma
    return dx, (dy * n).sum(axis=tuple(range(x.ndim - 1)))


def _deviation(centered, epsilon, kind):
    """Return the divisor sigma of a layer norm, and the slope of sigma, where ``dsigma = slope mean(n dx)``."""
    if kind == "standard":
        return np.sqrt(np.square(centered).mean(axis=-1, keepdims=True) + epsilon), 1.0
    d_model = centered.shape[-1]
    std = np.sqrt(np.square(centered).sum(axis=-1, keepdims=True) / (d_model - 1))
    sigma = std + epsilon
    return sigma, sigma / np.where(std == 0.0, 1.0, std) * d_model / (d_model - 1)


def relu(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return ``max(0, x)``, equation (2)."""
    return np.maximum(x, 0.0)


def relu_backward(x: Float[ndarray, "*axes"], dy: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return the gradient with respect to ``x``: ``dy`` if ``x`` is positive, else 0.

    Instead of ``x``, you can pass the output ``y``, which is positive at the same elements.
    """
    return dy * (x > 0.0)


_erfc = np.vectorize(math.erfc, otypes=[np.float64])  # NumPy has no error function


def normal_cdf(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return ``Phi(x)``, the probability that a standard normal variable is at most ``x``, in float64.

    ``erfc`` is accurate for negative ``x``, for which ``1 + erf`` would lose digits.
    """
    return 0.5 * _erfc(-math.sqrt(0.5) * x.astype(np.float64))


@UNDERFLOW
def gelu(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return ``x Phi(x)`` (Hendrycks and Gimpel, 2016)."""
    x = np.asarray(x)
    return (x * normal_cdf(x)).astype(np.float64 if x.dtype.kind in "biu" else x.dtype)


def gelu_backward(x: Float[ndarray, "*axes"], dy: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return the gradient with respect to ``x``, ``dy (Phi(x) + x phi(x))``, where ``phi`` is the normal density."""
    density = np.exp(-0.5 * np.square(x)) / math.sqrt(2.0 * math.pi)
    return (dy * (normal_cdf(x) + x * density)).astype(x.dtype)


def gelu_tanh(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return the tanh approximation of GELU. The approximation error is at most 5e-4."""
    return 0.5 * x * (1.0 + _tanh(x))


def gelu_tanh_backward(x: Float[ndarray, "*axes"], dy: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return the gradient with respect to ``x``, using the derivative ``(1 - t^2) u'`` of ``t = tanh(u)``."""
    t, du = _tanh(x), math.sqrt(2.0 / math.pi) * (1.0 + 3 * 0.044715 * x * x)
    return dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du)


def _tanh(x):
    return np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))


def swish(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return ``x sigmoid(x)``, also called SiLU."""
    return x * sigmoid(x)


def swish_backward(x: Float[ndarray, "*axes"], dy: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return the gradient with respect to ``x``, ``dy s (1 + x (1 - s))``, where ``s`` is ``sigmoid(x)``."""
    s = sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


def sigmoid(x: Float[ndarray, "*axes"]) -> Float[ndarray, "*axes"]:
    """Return ``1 / (1 + exp(-x))``."""
    with np.errstate(over="ignore", under="ignore"):  # if exp overflows, the result 0 is correct
        return 1.0 / (1.0 + np.exp(-x))


Activation = Callable[[ndarray], ndarray]
ACTIVATIONS: dict[str, Activation] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swish": swish,
}
ACTIVATIONS_BACKWARD: dict[Activation, Callable[[ndarray, ndarray], ndarray]] = {
    relu: relu_backward,
    gelu: gelu_backward,
    gelu_tanh: gelu_tanh_backward,
    swish: swish_backward,
}


def draw_keep(shape: tuple[int, ...], rate: float, rng: np.random.Generator) -> Bool[ndarray, "*axes"]:
    """Sample a mask that is True for elements to keep. Dropout keeps each element with probability ``1 - rate``."""
    return rng.random(shape, dtype=np.float32) >= rate


def dropout(x: Float[ndarray, "*axes"], keep: Bool[ndarray, "*axes"], rate: float) -> Float[ndarray, "*axes"]:
    """Set dropped elements to zero and scale the rest by ``1 / (1 - rate)``, which preserves the mean (section 5.4).

    The function is linear in ``x``, so it is also its own backward pass.
    """
    return x * keep / (1.0 - rate)
