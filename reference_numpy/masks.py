"""Attention masks (Vaswani et al., 2017, section 3.2.3). True means that a position may be attended to.

Axes: B batch, S source length, T target length, L source or target length.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from transformer_spec.shapes import Bool, Int


def padding_mask(ids: Int[ndarray, "B L"], pad_id: int) -> Bool[ndarray, "B L"]:
    """Return a mask that is True for tokens and False for padding.

    Args:
        ids: Token IDs, padded with ``pad_id``.
        pad_id: ID of the padding token.
    """
    ids = np.asarray(ids)
    return ids != pad_id


def target_padding_mask(target_ids: Int[ndarray, "B T"], pad_id: int) -> Bool[ndarray, "B T"]:
    """Return a mask that is True for target tokens and False for padding. The first position is always True.

    The first target token is BOS. It must never be masked, even if BOS and padding have the same ID, as in Marian.

    Args:
        target_ids: Token IDs that the decoder reads, padded with ``pad_id``.
        pad_id: ID of the padding token.
    """
    is_first = np.arange(np.shape(target_ids)[1]) == 0
    return padding_mask(target_ids, pad_id) | is_first


def causal_mask(length: int) -> Bool[ndarray, "T T"]:
    """Return a mask that lets each target position attend only to itself and to earlier positions.

    Args:
        length: Number of target positions.
    """
    return np.tri(length, dtype=bool)
