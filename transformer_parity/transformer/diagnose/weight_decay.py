"""Decoupled weight decay, measured: the part of each weight that the first step subtracts beside Adam's update."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.trials import TRUTH, observed
from transformer_parity.transformer.mistakes.mistake import Mistake
from transformer_parity.transformer.mistakes.other_optimizers import MATRICES, decoupled

SAME = 1e-6  # relative: rounding of a small difference between weights leaves less


def decay_hypotheses(case: Case, shown: Mapping[str, ndarray]) -> list[Mistake]:
    """Return weight decay with the coefficient that the first step shows; nothing if it shows none.

    Args:
        case: The case, with optimizer steps.
        shown: The port's tensors.
    """
    usual = (observed(TRUTH, case) or {}) if case.settings is not None else {}
    parts: dict[bool, list[float]] = {True: [], False: []}  # whether a parameter is a matrix
    for name, array in case.load_weights().items() if usual else ():
        tap, weight = f"step 1 weight {name}", array.astype(np.float64)
        if tap not in shown or tap not in usual or shown[tap].shape != weight.shape:
            continue
        less = usual[tap] - shown[tap]
        part = float(np.vdot(less, weight) / max(np.vdot(weight, weight), 1e-300))
        if np.linalg.norm(less - part * weight) > SAME * np.linalg.norm(less) + 1e-15 * np.linalg.norm(weight):
            return []
        parts[weight.ndim > 1].append(part)
    part = float(np.median(parts[True] or [0.0]))
    if not part > 0.0 or not np.allclose(parts[True], part, SAME, 0.0):
        return []
    value = f"{part / case.training.learning_rate(1, case.config.d_model):.6g}"
    if value == "0.01":  # the catalog contains this value
        return []
    if np.allclose(parts[False], part, 1e-3, 0.0):
        return [Mistake(f"decoupled weight decay of {value}", "", decoupled(value))]
    if np.allclose(parts[False], 0.0, 0.0, 1e-3 * part):
        return [Mistake(f"decoupled weight decay of {value}, not of biases and norms", "", decoupled(value, MATRICES))]
    return []
