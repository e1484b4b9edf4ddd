"""Masks (Vaswani et al., 2017, section 3.2.3). True = may attend.

B batch, S source length, T target length, L length of either.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from transformer_spec.shapes import Bool, Int


def padding_mask(ids: Int[ndarray, "B L"], pad_id: int) -> Bool[ndarray, "B L"]:
    """Mark the positions that hold a token rather than padding."""
    return ids != pad_id


def target_padding_mask(target_ids: Int[ndarray, "B T"], pad_id: int) -> Bool[ndarray, "B T"]:
    """Mark the positions that hold a token rather than padding; the first one always does.

    The first target token is the start symbol, and Marian's start symbol is its padding id.
    """
    is_first = np.arange(target_ids.shape[1]) == 0
    return padding_mask(target_ids, pad_id) | is_first


def causal_mask(length: int) -> Bool[ndarray, "T T"]:
    """Let each target position attend to itself and to what came before it."""
    return np.tri(length, dtype=bool)
