"""Masks (Vaswani et al., 2017, section 3.2.3). True = may attend.

B batch, S source length, T target length, L length of either.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.shapes import Bool, Int


def padding_mask(ids: Int[Tensor, "B L"], pad_id: int) -> Bool[Tensor, "B L"]:
    """Mark the positions that hold a token rather than padding."""
    return keras.ops.not_equal(ids, pad_id)


def target_padding_mask(target_ids: Int[Tensor, "B T"], pad_id: int) -> Bool[Tensor, "B T"]:
    """Mark the positions that hold a token rather than padding; the first one always does.

    The first target token is the start symbol, and Marian's start symbol is its padding id.
    """
    is_first = tf.range(tf.shape(target_ids)[1]) == 0
    return padding_mask(target_ids, pad_id) | is_first


def causal_mask(length: int) -> Bool[Tensor, "T T"]:
    """Let each target position attend to itself and to what came before it."""
    positions = tf.range(length)
    return positions[:, None] >= positions[None, :]
