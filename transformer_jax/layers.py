"""The layers that every framework ships, with this project's names, defaults and initial values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import SingleDeviceSharding

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


class Places(nnx.Rngs):
    """What a model is built with whose parameters are loaded: each begins as a shape, and no number is drawn for it.

    ``nnx.eval_shape`` would do the same, but trace what is drawn, which takes longer than to build the model.

    Args:
        device: Where the model is bound to be; None is nowhere yet.
    """

    def __init__(self, device: jax.Device | None = None) -> None:
        key = jax.random.key(0)
        super().__init__(dropout=key if device is None else jax.device_put(key, device))
        self.place = None if device is None else SingleDeviceSharding(device)

    def params(self) -> SingleDeviceSharding | None:
        """Return the place of the next parameter, where others return a key."""
        return self.place


def initial(initializer: Callable[..., Array]) -> Callable[..., Any]:
    """Return an initializer that draws with a key, and with a place returns the shape alone."""

    def draw(key: Any, shape: tuple[int, ...], dtype: str) -> Any:
        if isinstance(key, Array):
            return initializer(key, shape, dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=key)

    return draw


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


def add_bias(x: Float[Array, "*axes width"], bias: Float[Array, " width"]) -> Float[Array, "*axes width"]:
    """Add a bias to a wide array.

    As a product with ones, which under ``jax.jit`` is an addition again, so that the bias' gradient is a product too:
    to sum up 512 rows of 37,000 takes XLA on a CPU 40 times as long.
    """
    return x + jnp.matmul(jnp.ones((*x.shape[:-1], 1), x.dtype), bias[None], precision="highest")


class Linear(nnx.Linear):
    """Multiply by a matrix and add a bias: ``x W + b``."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool, dtype: str = "float32", rngs: nnx.Rngs) -> None:
        super().__init__(
            d_in,
            d_out,
            use_bias=bias,
            dtype=dtype,
            param_dtype=dtype,
            kernel_init=initial(nnx.initializers.xavier_uniform()),  # NNX's own default is a truncated normal
            bias_init=initial(nnx.initializers.zeros),
            rngs=rngs,
        )

    def __call__(self, x: Float[Array, "*axes d_in"]) -> Float[Array, "*axes d_out"]:  # type: ignore[override]
        """Map the last axis of ``x``."""
        # One matrix product, whatever the leading axes: of one with more axes, XLA takes the gradient a tenth slower.
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


class LayerNorm(nnx.LayerNorm):
    """Normalise the last axis, then scale and shift it (Ba et al., 2016).

    Kind ``standard`` divides by sqrt(biased variance + epsilon), kind ``annotated`` by (unbiased standard
    deviation + epsilon), as the Annotated Transformer does.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, rngs: nnx.Rngs) -> None:
        super().__init__(
            config.d_model,
            epsilon=config.layer_norm_epsilon,
            dtype=dtype,
            param_dtype=dtype,
            use_fast_variance=False,  # E[x^2] - E[x]^2 is garbage where the mean is large
            scale_init=initial(nnx.initializers.ones),
            bias_init=initial(nnx.initializers.zeros),
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
