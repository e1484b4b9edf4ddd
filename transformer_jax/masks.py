"""Attention masks (Vaswani et al., 2017, section 3.2.3). True means that a position may be attended to.

Axes: B batch, S source length, T target length, L source or target length.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from transformer_spec.shapes import Bool, Int


def padding_mask(ids: Int[Array, "B L"], pad_id: int) -> Bool[Array, "B L"]:
    """Return a mask that is True for tokens and False for padding.

    Args:
        ids: Token IDs, padded with ``pad_id``.
        pad_id: ID of the padding token.
    """
    ids = jnp.asarray(ids)
    return ids != pad_id


def target_padding_mask(target_ids: Int[Array, "B T"], pad_id: int) -> Bool[Array, "B T"]:
    """Return a mask that is True for target tokens and False for padding. The first position is always True.

    The first target token is BOS. It must never be masked, even if BOS and padding have the same ID, as in Marian.

    Args:
        target_ids: Token IDs that the decoder reads, padded with ``pad_id``.
        pad_id: ID of the padding token.
    """
    is_first = jnp.arange(np.shape(target_ids)[1]) == 0
    return padding_mask(target_ids, pad_id) | is_first


def causal_mask(length: int) -> Bool[Array, "T T"]:
    """Return a mask that lets each target position attend only to itself and to earlier positions.

    Args:
        length: Number of target positions.
    """
    return jnp.tri(length, dtype=bool)
