"""Masks (Vaswani et al., 2017, section 3.2.3). True = may attend.

B batch, S source length, T target length, L length of either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_spec.shapes import Bool, Int


def padding_mask(ids: Int[Tensor, "B L"], pad_id: int) -> Bool[Tensor, "B L"]:
    """Mark the positions that hold a token rather than padding."""
    return ids != pad_id


def target_padding_mask(target_ids: Int[Tensor, "B T"], pad_id: int) -> Bool[Tensor, "B T"]:
    """Mark the positions that hold a token rather than padding; the first one always does.

    The first target token is the start symbol, and Marian's start symbol is its padding id.
    """
    is_first = torch.arange(target_ids.shape[1], device=target_ids.device) == 0
    return padding_mask(target_ids, pad_id) | is_first


def causal_mask(length: int, device: torch.device | None = None) -> Bool[Tensor, "T T"]:
    """Let each target position attend to itself and to what came before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()
