"""Masks that exclude unused values from the comparison: activations at padding positions, and scores of masked keys.

No loss, token, or parameter gradient depends on these values, so a correct port may return any number or NaN for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tolerances import EPS
from transformer_parity.transformer.cases.case import DECODE, GRADIENTS, STEPS, Case


@dataclass(frozen=True)
class Read:
    """The positions that the model uses in each tensor.

    Attributes:
        masks: A dict from tensor names to masks, which are True at used positions and broadcast to the tensors' shapes.
            If a tensor has no mask, all its positions are used.
    """

    masks: Mapping[str, ndarray]

    @classmethod
    def of(cls, case: Case, names: Iterable[str]) -> Read:
        """Return the used positions of the named tensors in a case."""
        if case.compares_padding or case.stage == DECODE:
            return cls({})
        source, target = (before_padding(case.inputs[f"{side}_ids"], case.config.pad_id) for side in SIDES)
        # All gradients are used, except the gradients with respect to the attention weights of masked keys. In the
        # backward pass, the softmax multiplies these gradients by 0.
        backward = case.stage == GRADIENTS
        # In training, only the logits that a forward pass computes between two steps have unused positions.
        if case.stage == STEPS:
            names = [name for name in names if name.endswith(" logits")]
        elif backward:
            names = [name for name in names if name.startswith("at ") and name.endswith(".weights")]
        return cls({name: _mask(name.removeprefix("at "), source, target, backward) for name in names})

    def combine(self, read: Arrays, unread: Arrays) -> Tensors:
        """Return tensors with the values of ``read`` at used positions and the values of ``unread`` elsewhere."""
        return {name: self._combined(name, value, unread.get(name)) for name, value in read.items()}

    def _combined(self, name: str, read: ndarray, unread: ndarray | None) -> ndarray:
        if name not in self.masks or unread is None or read.shape != unread.shape or read.dtype.name not in EPS:
            return read
        return np.where(self.masks[name], read, unread.astype(read.dtype))


SIDES = ("source", "target")


def before_padding(ids: ndarray, pad_id: int) -> ndarray:
    """Return a mask that is False for padding at the end of each row of ids [B, L].

    The first position is always True.
    """
    is_token = ids != pad_id
    is_token[:, :1] = True
    return np.logical_or.accumulate(is_token[:, ::-1], axis=1)[:, ::-1]


def _mask(name: str, source: ndarray, target: ndarray, backward: bool) -> ndarray:
    of_source = name.startswith(("source_", "encoder."))
    if name.endswith("relative_bias.output"):  # all sequences share the bias
        length = (source if of_source else target).shape[1]
        return np.tri(length, dtype=bool) if name.startswith("decoder.") else np.ones((length, length), bool)
    queries = source if of_source else target
    keys = source if of_source or ".cross_attention." in name else target
    kind = name.rpartition(".")[2]
    if kind in ("key", "value"):
        return keys[:, None, :, None]
    if kind == "scores" or backward:
        allowed = (queries | backward)[:, None, :, None] & keys[:, None, None, :]  # [B, 1, L, M]
        return np.tril(allowed) if name.startswith("decoder.") and ".self_attention." in name else allowed
    return queries[:, None, :, None] if kind in ("query", "context", "weights") else queries[:, :, None]
