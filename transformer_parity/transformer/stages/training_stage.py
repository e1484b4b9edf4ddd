"""Names and error measures that the ``gradients`` and ``steps`` stages share."""

from __future__ import annotations

import math

import numpy as np

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.tensors import relative_error
from transformer_parity.transformer.stages.stage import Stage

LOSS, WHOLE = "loss", "the whole gradient"


class TrainingStage(Stage):
    """A stage that requires labels."""

    has_loss = True

    def error(self, name: str, actual: Arrays, expected: Arrays) -> float:
        """Return the relative error of a tensor, as defined in ``training_error``."""
        return training_error(name, actual, expected)


def training_error(name: str, actual: Arrays, expected: Arrays) -> float:
    """Return the relative error of a tensor.

    The exact gradient of a key bias is zero, because adding a constant to all scores doesn't change the attention
    weights. The computed gradient is rounding noise, which is measured relative to the gradient of the query bias.

    Other gradients can also be zero. For example, the gradients of the scores and of the query bias are zero if there
    is only one key. The noise in these gradients is divided by the norm of the concatenated gradient of all parameters.
    """
    usual = expected[name.replace("key_proj.bias", "query_proj.bias")] if is_noise(name) else expected[name]
    scale = usual if usual.any() or WHOLE not in expected else expected[WHOLE]
    if scale is expected[name] or expected[name].shape != np.shape(actual[name]):
        return relative_error(actual[name], expected[name])
    difference = np.linalg.norm(np.asarray(actual[name], np.float64) - expected[name])
    size = np.linalg.norm(scale)  # zero if a bug removes the entire gradient
    return float(difference / size) if difference and size else math.inf if difference else 0.0


def is_noise(name: str) -> bool:
    """Return True for tensors of a key bias, because the gradient of a key bias is rounding noise."""
    return name.endswith("key_proj.bias")
