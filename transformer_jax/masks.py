"""Masks (Vaswani et al., 2017, section 3.2.3). True = may attend.

B batch, S source length, T target length, L length of either.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from transformer_spec.shapes import Bool, Int


def padding_mask(ids: Int[Array, "B L"], pad_id: int) -> Bool[Array, "B L"]:
    """Mark the positions that hold a token rather than padding."""
    return ids != pad_id


def target_padding_mask(target_ids: Int[Array, "B T"], pad_id: int) -> Bool[Array, "B T"]:
    """Mark the positions that hold a token rather than padding; the first one always does.

    The first target token is the start symbol, and Marian's start symbol is its padding id.
    """
    is_first = jnp.arange(target_ids.shape[1]) == 0
    return padding_mask(target_ids, pad_id) | is_first


def causal_mask(length: int) -> Bool[Array, "T T"]:
    """Let each target position attend to itself and to what came before it."""
    return jnp.tri(length, dtype=bool)
