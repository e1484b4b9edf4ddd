"""Optimized functions and layers.

A model with ``fast=False`` doesn't use them, but computes the same results up to rounding. ``accelerate`` makes
attention process long inputs block by block, and replaces linear layers with layers that compute their gradients using
plain matmuls. In each step of a search, ``top_by_blocks`` divides the scores of all possible next tokens into blocks,
and ranks only the scores in the blocks with the largest maxima.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from transformer_jax.attention import MultiHeadAttention, scaled_dot_product_attention
from transformer_jax.embedding import TiedProjection
from transformer_spec.checks import check_attention, check_attention_bias, check_attention_mask
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap

BLOCK = 32  # values per block; only the blocks with the largest maxima are sorted
QUERY_BLOCK = 256  # maximum number of queries whose scores are computed at once


class FastLinear(nnx.Linear):
    """Linear layer that multiplies all rows in one matmul, because XLA's gradients of batched matmuls are slow."""

    def __call__(self, x: Float[Array, "*axes d_in"]) -> Float[Array, "*axes d_out"]:  # type: ignore[override]
        """Return ``x W + b``, applied to the last axis of ``x``."""
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


class FastTiedProjection(TiedProjection):
    """Tied projection that multiplies all rows in one matmul, like ``FastLinear``."""

    def __call__(self, x: Float[Array, "B L d_model"]) -> Float[Array, "B L V"]:
        """Return the logits of each position."""
        return super().__call__(x.reshape(1, -1, x.shape[-1])).reshape(*x.shape[:-1], -1)


FAST = {nnx.Linear: FastLinear, TiedProjection: FastTiedProjection}


class SameKey(nnx.RngStream):
    """Random state that always returns the same key."""

    def __call__(self) -> Array:
        """Return the key."""
        return self.key[...]


def same_keys() -> nnx.Rngs:
    """Return a random state for a model that is never initialized.

    It has no key counter, because a counter is slow to trace.
    """
    rngs = nnx.Rngs(0)
    rngs.default = SameKey(0, tag="default")  # type: ignore[attr-defined]
    return rngs


def accelerate(model: nnx.Module) -> None:
    """Replace layers and functions of a newly constructed model with faster ones that compute the same results."""
    for _, module in nnx.iter_modules(model):
        if type(module) in FAST:  # bypass NNX, which would treat the class as a submodule
            object.__setattr__(module, "__class__", FAST[type(module)])
        if isinstance(module, MultiHeadAttention):
            module.attend = attend_by_blocks


def attend_by_blocks(
    query: Float[Array, "B H L d_k"],
    key: Float[Array, "B H M d_k"],
    value: Float[Array, "B H M d_v"],
    mask: Bool[Array, "#B #H #L #M"] | None = None,
    dropout: Callable[[Array], Array] | None = None,
    tap: Tap = no_tap,
    bias: Float[Array, "#B #H #L #M"] | None = None,
) -> Float[Array, "B H L d_v"]:
    """Compute ``scaled_dot_product_attention``. For long inputs on a CPU, compute it in blocks.

    The blocks avoid storing all attention weights at once. If a tap or dropout is used, attention isn't computed in
    blocks, because taps and dropout require the full array of attention weights.
    """
    if tap is not no_tap or dropout is not None or query.shape[2] <= QUERY_BLOCK:
        return scaled_dot_product_attention(query, key, value, mask, dropout, tap, bias)
    check_attention(query.shape, key.shape, value.shape)
    if mask is not None:
        check_attention_mask(mask.shape, mask.dtype.name, query.shape, key.shape)
    if bias is not None:
        check_attention_bias(bias.shape, query.shape, key.shape)
    # The platform is known only at compile time, because jax.export can choose it. A GPU computes all blocks in
    # parallel.
    return jax.lax.platform_dependent(query, key, value, mask, bias, cpu=_attend_in_blocks, default=_attend_at_once)


def _attend_at_once(query, key, value, mask, bias):
    return scaled_dot_product_attention(query, key, value, mask, bias=bias)


def _attend_in_blocks(query, key, value, mask, bias):
    """Compute attention for one head and one block of queries at a time. The backward pass recomputes the scores."""
    batch, heads, length, width = query.shape
    blocks = -(-length // QUERY_BLOCK)
    padding = (0, 0), (0, 0), (0, blocks * QUERY_BLOCK - length), (0, 0)
    mask, bias = (x if x is None or x.shape[2] == 1 else jnp.pad(x, padding) for x in (mask, bias))

    @partial(jax.checkpoint, prevent_cse=False)
    def attend(b, h, i, block, key, value):
        def part(x):  # if a mask or a bias broadcasts along an axis, the slice starts at 0
            sizes = 1, 1, min(QUERY_BLOCK, x.shape[2]), x.shape[3]
            return jax.lax.dynamic_slice(x, (b, h, i * QUERY_BLOCK, 0), sizes)

        allowed, added = (None if x is None else part(x) for x in (mask, bias))
        query, key, value = (x[None, None] for x in (block, key, value))
        return scaled_dot_product_attention(query, key, value, allowed, bias=added)[0, 0]

    def each(function, *arrays):
        return jax.lax.map(lambda inputs: function(*inputs), (jnp.arange(len(arrays[0])), *arrays))

    query = jnp.pad(query, padding).reshape(batch, heads, blocks, QUERY_BLOCK, width)
    context = each(
        lambda b, *sentence: each(
            lambda h, query, *memory: each(lambda i, block: attend(b, h, i, block, *memory), query), *sentence
        ),
        *(query, key, value),
    )
    return context.reshape(batch, heads, blocks * QUERY_BLOCK, -1)[:, :, :length]


def top_by_blocks(values: Float[Array, "B N"], count: int) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Return the largest values of each row and their indices. Ties go to the lower index.

    On a CPU, computing the maximum of each block takes 90% less time than ``top_k`` on all values. The largest values
    are in the blocks with the largest maxima. If blocks have the same maximum, earlier blocks are preferred.
    """
    rows, size = values.shape
    values = jnp.where(jnp.isnan(values), inf, values)  # rank NaN first, so that the search raises an error
    if size <= BLOCK * count:
        best, index = jax.lax.top_k(values, count)  # top_k returns a list
        return best, index
    past_the_end = (0, 0), (0, -size % BLOCK)
    maxima = jax.lax.reduce_window(values, -inf, jax.lax.max, (1, BLOCK), (1, BLOCK), past_the_end)
    _, block = top_by_blocks(maxima, count)
    # Keep the original order, so that ties go to the lower index.
    place = (jnp.sort(block)[:, :, None] * BLOCK + jnp.arange(BLOCK, dtype=block.dtype)).reshape(rows, -1)
    best, at = jax.lax.top_k(jnp.take_along_axis(values, place, 1, mode="fill", fill_value=-inf), count)
    return best, jnp.take_along_axis(place, at, 1)
