"""The kernel that a projection multiplies by, if it is not its own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.transformer.diagnose.evidence.closeness import is_close, without_heads


def other_kernel(name: str, alone: Arrays, wanted: Arrays, weights: Mapping[str, ndarray]) -> str:
    """Return a sentence about the parameter that replaces the kernel of a projection; empty if there is none.

    Args:
        name: The tap that the projection computes.
        alone: The port's tensors, each computed from correct inputs.
        wanted: The correct tensors for the same inputs.
        weights: The parameters.
    """
    own = f"{name}_proj"
    if f"{own}.kernel" not in weights or np.shape(alone[name]) != wanted[name].shape:
        return ""
    kernel, bias = weights[f"{own}.kernel"], weights.get(f"{own}.bias", np.zeros(()))
    actual, right = without_heads(alone[name]), without_heads(wanted[name])
    states = [state for state in map(without_heads, wanted.values()) if state.shape == (*right.shape[:2], len(kernel))]
    read = next((state for state in states if is_close(state @ kernel + bias, right)), None)
    wrong = (actual != right).any(-1)  # padding has the reference's values
    for other, value in weights.items() if read is not None and wrong.any() else ():
        turned = {other: value, f"the transpose of {other}": value.T}
        for words, matrix in turned.items():
            if (
                matrix.shape == kernel.shape
                and words != f"{own}.kernel"
                and is_close((read @ matrix + bias)[wrong], actual[wrong])
            ):
                return f"the kernel is {words}, with the right bias" if bias.ndim else f"the kernel is {words}"
    return ""
