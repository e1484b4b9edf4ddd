"""Attention masks (Vaswani et al., 2017, section 3.2.3). True means that a position may be attended to.

Axes: B batch, S source length, T target length, L source or target length.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from transformer_spec.shapes import Bool, Int


def padding_mask(ids: Int[Tensor, "B L"], pad_id: int) -> Bool[Tensor, "B L"]:
    """Return a mask that is True for tokens and False for padding.

    Args:
        ids: Token IDs, padded with ``pad_id``.
        pad_id: ID of the padding token.
    """
    ids = ids if isinstance(ids, Tensor) else torch.as_tensor(np.array(ids))
    return ids != pad_id


def target_padding_mask(target_ids: Int[Tensor, "B T"], pad_id: int) -> Bool[Tensor, "B T"]:
    """Return a mask that is True for target tokens and False for padding. The first position is always True.

    The first target token is BOS. It must never be masked, even if BOS and padding have the same ID, as in Marian.

    Args:
        target_ids: Token IDs that the decoder reads, padded with ``pad_id``.
        pad_id: ID of the padding token.
    """
    target_ids = target_ids if isinstance(target_ids, Tensor) else torch.as_tensor(np.array(target_ids))
    is_first = torch.arange(target_ids.shape[1], device=target_ids.device) == 0
    return padding_mask(target_ids, pad_id) | is_first


def causal_mask(length: int, device: torch.device | None = None) -> Bool[Tensor, "T T"]:
    """Return a mask that lets each target position attend only to itself and to earlier positions.

    Args:
        length: Number of target positions.
        device: Device of the mask. If None, PyTorch's default device is used.
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()
