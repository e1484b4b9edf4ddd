"""Flax's basic layers, with this package's parameter names, defaults, and initial values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float

__all__ = ["ACTIVATIONS", "Dropout", "LayerNorm", "Linear", "RMSNorm", "make_norm", "masked_softmax"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),  # JAX's default is the tanh approximation
    "gelu_tanh": jax.nn.gelu,
    "swish": jax.nn.silu,
}

Dropout = nnx.Dropout


def masked_softmax(
    scores: Float[Array, "*axes M"], mask: Bool[Array, "*#axes #M"] | None = None
) -> Float[Array, "*axes M"]:
    """Return the softmax over the allowed keys. If no key is allowed, all weights are zero.

    Args:
        scores: Similarity of each key to the query.
        mask: True if a key is allowed. If None, every key is allowed.
    """
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))  # bfloat16 is too imprecise for sums
    if mask is None:
        return jax.nn.softmax(wide).astype(scores.dtype)
    # Use the lowest finite score, because a row of -inf would give NaN in both the forward and the backward pass.
    weights = jax.nn.softmax(jnp.where(mask, wide, jnp.finfo(wide.dtype).min))
    return jnp.where(mask, weights, 0.0).astype(scores.dtype)


def Linear(  # noqa: N802  the name of a layer
    d_in: int, d_out: int, *, bias: bool, dtype: str = "float32", gain: float = 1.0, rngs: nnx.Rngs
) -> nnx.Linear:
    """Return an ``nnx.Linear``, ``x W + b``, with a Xavier-uniform matrix and a zero bias.

    Args:
        d_in: Size of the last axis of the input.
        d_out: Size of the last axis of the output.
        bias: Whether to add a bias.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        gain: Factor by which the initial values of the matrix are multiplied.
        rngs: Flax random state for the initial values.
    """
    # NNX's default is a truncated normal distribution.
    xavier = nnx.initializers.variance_scaling(gain**2, "fan_avg", "uniform")
    return nnx.Linear(d_in, d_out, use_bias=bias, param_dtype=dtype, kernel_init=xavier, rngs=rngs)


class LayerNorm(nnx.LayerNorm):
    """Layer normalization over the last axis, followed by a learned scale and bias (Ba et al., 2016).

    If ``config.layer_norm_kind`` is ``standard``, the divisor is sqrt(biased variance + epsilon). If it is
    ``annotated``, the divisor is (unbiased standard deviation + epsilon), as in the Annotated Transformer.

    Args:
        config: Model configuration, which defines the size, the epsilon, and the formula for the divisor.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        rngs: Flax random state, which the base class requires.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        super().__init__(
            config.d_model,
            epsilon=config.layer_norm_epsilon,
            param_dtype=dtype,
            use_fast_variance=False,  # E[x^2] - E[x]^2 loses precision if the mean is large
            rngs=rngs,
        )
        self.kind = config.layer_norm_kind

    def __call__(self, x: Float[Array, "*axes d_model"]) -> Float[Array, "*axes d_model"]:  # type: ignore[override]
        """Normalize each position of ``x``."""
        if self.kind == "standard":
            return super().__call__(x)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centered = wide - wide.mean(-1, keepdims=True)
        normed = centered / (wide.std(-1, ddof=1, keepdims=True) + self.epsilon)
        return normed.astype(x.dtype) * self.scale[...] + self.bias[...]  # type: ignore[index]


class RMSNorm(nnx.RMSNorm):
    """Root mean square normalization over the last axis, followed by a learned scale (Zhang and Sennrich, 2019).

    Args:
        config: Model configuration, which defines the size and the epsilon.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        rngs: Flax random state, which the base class requires.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        super().__init__(config.d_model, epsilon=config.layer_norm_epsilon, param_dtype=dtype, rngs=rngs)


def make_norm(config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> LayerNorm | RMSNorm:
    """Return an ``RMSNorm`` if ``config.layer_norm_kind`` is ``rms``, and a ``LayerNorm`` otherwise."""
    return (RMSNorm if config.layer_norm_kind == "rms" else LayerNorm)(config, dtype, rngs=rngs)
