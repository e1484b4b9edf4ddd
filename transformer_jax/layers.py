"""The layers that every framework ships, with this project's names, defaults and initial values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float

__all__ = ["ACTIVATIONS", "Dropout", "LayerNorm", "Linear", "masked_softmax"]

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
    """Turn scores into weights that sum to one over the allowed keys, and to zero where none is allowed."""
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))  # bfloat16 is too coarse to sum in
    if mask is None:
        return jax.nn.softmax(wide).astype(scores.dtype)
    # The lowest finite score, not -inf: a row of -inf would be NaN, forward and backward.
    weights = jax.nn.softmax(jnp.where(mask, wide, jnp.finfo(wide.dtype).min))
    return jnp.where(mask, weights, 0.0).astype(scores.dtype)


def Linear(d_in: int, d_out: int, *, bias: bool, dtype: str = "float32", rngs: nnx.Rngs) -> nnx.Linear:  # noqa: N802
    """Return a layer that multiplies by a matrix and adds a bias, ``x W + b``, with Xavier-uniform initial values."""
    xavier = nnx.initializers.xavier_uniform()  # NNX's default is a truncated normal
    return nnx.Linear(d_in, d_out, use_bias=bias, param_dtype=dtype, kernel_init=xavier, rngs=rngs)


class LayerNorm(nnx.LayerNorm):
    """Normalise the last axis, then scale and shift it (Ba et al., 2016).

    Kind ``standard`` divides by sqrt(biased variance + epsilon), kind ``annotated`` by (unbiased standard
    deviation + epsilon), as the Annotated Transformer does.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        super().__init__(
            config.d_model,
            epsilon=config.layer_norm_epsilon,
            param_dtype=dtype,
            use_fast_variance=False,  # E[x^2] - E[x]^2 is garbage where the mean is large
            rngs=rngs,
        )
        self.kind = config.layer_norm_kind

    def __call__(self, x: Float[Array, "*axes d_model"]) -> Float[Array, "*axes d_model"]:  # type: ignore[override]
        """Normalise each position of ``x``."""
        if self.kind == "standard":
            return super().__call__(x)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - wide.mean(-1, keepdims=True)
        normed = centred / (wide.std(-1, ddof=1, keepdims=True) + self.epsilon)
        return normed.astype(x.dtype) * self.scale[...] + self.bias[...]  # type: ignore[index]
