"""Signatures: recognizable patterns in the error of a block, for errors that no candidate explains.

Tensors have the same axes as their taps: the first axis is the sentence, the second axis is the head if there are four
axes, and the second-to-last axis is the position.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from transformer_parity.engine import signatures as engine
from transformer_parity.engine.signatures import ENOUGH, SAME, misshapen, wrong
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.evidence.closeness import factor_in_words
from transformer_spec.config import TransformerConfig


def signatures(
    actual: ndarray,
    wanted: ndarray,
    config: TransformerConfig,
    weights: Mapping[str, ndarray] | None = None,
    far: float = SAME,
    case: Case | None = None,
) -> list[str]:
    """Return descriptions of all recognizable patterns in the error of a tensor, starting with the most specific one.

    Args:
        actual: The port's result.
        wanted: The correct result.
        config: Config of the model.
        weights: Weights of the model, used to recognize a vector that is added or missing.
        far: Relative error above which an element is wrong.
        case: The case whose batch sizes may explain a wrong factor; None if the tensor is not a sum over the batch.
    """
    if actual.shape != wanted.shape:
        return [misshapen(actual, wanted)]
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    if np.isfinite(wanted).all() and (filled := engine.filled(actual, wanted, far)):
        return [filled]
    if not np.isfinite(actual).all():
        missing = ~np.isfinite(actual)
        return [f"{int(missing.sum())} of {missing.size} values are NaN or infinite"]
    if actual.size < ENOUGH or not wrong(actual, wanted, far).any():
        return []
    found = [*engine.masked(actual, wanted)] if actual.ndim == 4 else []
    found += engine.dropped(actual, wanted, far)
    found += engine.factor(actual, wanted, far, lambda ratio: factor_in_words(ratio, config, case))
    return [*found, *engine.offset(actual, wanted, far, weights or {}), *engine.permuted(actual, wanted, far)]


def places(actual: ndarray, wanted: ndarray, far: float = SAME) -> list[str]:
    """Report which sentences, heads, and positions of a tensor are wrong.

    For example, if all heads are wrong, the result doesn't mention heads.
    """
    if actual.ndim < 3:
        return []
    heads = {} if actual.ndim == 3 else {"heads": 1}
    return engine.places(actual, wanted, far, {"sentences": 0, **heads, "positions": actual.ndim - 2})
