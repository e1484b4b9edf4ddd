"""The learning rate, measured: how far the weights move in the first step, and how far they should.

Adam's first step does not depend on the size of a gradient: where every weight moves the right way, and all by the same
factor too far, the rate of that step is wrong by this factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.trials import TRUTH, observed
from transformer_parity.transformer.mistakes.mistake import Mistake
from transformer_parity.transformer.mistakes.optimizer import rate
from transformer_parity.transformer.stages.steps import SNAPSHOTS

Arrays = Mapping[str, ndarray]
EXACT, SURE = 1e-9, 1e-4  # relative
ROUNDED = 1e-6  # relative: rates of float32 are off by less
SCHEDULE = "look at the learning rate, which is settings.learning_rate(step, d_model)"
RATE, FIRST_RATE = (f"settings.learning_rate({step}, config.d_model)" for step in ("n", "1"))
DIGITS = 12  # of a factor that is measured: rounding leaves so many


def rate_hypotheses(case: Case, shown: Arrays) -> list[Mistake]:
    """Return which schedules would yield the rate of the first step; none where it is right, or cannot be measured."""
    factor = _moved(case, shown)[0]
    if not math.isfinite(factor) or factor <= 0.0 or abs(factor - 1.0) <= ROUNDED:
        return []
    settings = case.training
    first = factor * settings.learning_rate(1, case.config.d_model)
    found = {
        f"{RATE} * {factor:.{DIGITS}g}": f"a learning rate that is {factor:.6g} times as large",
        f"{FIRST_RATE} * {factor:.{DIGITS}g}": f"a constant learning rate of {first:.6g}",
    }
    warmup = settings.warmup_steps * factor ** (-2.0 / 3.0)
    if round(warmup) >= 1 and math.isclose(warmup, round(warmup), rel_tol=1e-6):
        other = f"type(settings)(**{{**vars(settings), 'warmup_steps': {round(warmup)}}})"
        words = f"a learning rate that warms up over {round(warmup)} steps, in place of {settings.warmup_steps}"
        found[RATE.replace("settings", other)] = words
    return [Mistake(name, "", rate(new)) for new, name in found.items()]


def of_learning_rate(case: Case, shown: Arrays) -> str:
    """Say by which factor the first step is too long; empty if it is not, or if that cannot be measured."""
    first, *later = _moved(case, shown)
    if not math.isfinite(first) or abs(first - 1.0) <= ROUNDED:
        return ""
    listed = ", ".join(f"{moved:.2g} after {step}" for step, moved in zip(SNAPSHOTS[1:], later, strict=True))
    factor = f"step 1 moves every weight the right way and {first:.6g} times as far as it should (about {listed} steps)"
    cause = "this is no constant factor of the learning rate: look at momentum, bias corrections, and the step counter"
    if all(math.isclose(moved, first, rel_tol=0.2) for moved in later):
        cause = SCHEDULE
    return f"in {case.name}, {factor}: {cause}"


def _moved(case: Case, shown: Arrays) -> list[float]:
    """Return how many times as far as they should the weights have moved, after each of some steps.

    The first is NaN where it is not the same for all weights; the others are means.
    """
    usual, start = observed(TRUTH, case) or {}, case.load_weights() if case.settings is not None else {}
    found = []
    for step in SNAPSHOTS:
        names = {name: f"step {step} weight {name}" for name in start}
        names = {name: tap for name, tap in names.items() if tap in shown and tap in usual}
        if not names or any(shown[tap].shape != start[name].shape for name, tap in names.items()):
            return [math.nan] * len(SNAPSHOTS)
        actual, expected = (
            np.concatenate([np.ravel(tensors[tap] - start[name].astype(np.float64)) for name, tap in names.items()])
            for tensors in (shown, usual)
        )
        factor = float(actual @ expected / max(expected @ expected, 1e-300))
        weights = np.concatenate([np.ravel(usual[tap]) for tap in names.values()])
        rounding = np.finfo(np.float64).eps * np.linalg.norm(weights)  # of weights that move little
        far = np.linalg.norm(actual - factor * expected)
        same = far <= max(EXACT * np.linalg.norm(actual), rounding) and far < SURE * np.linalg.norm(actual)
        found.append(factor if same or step > 1 else math.nan)
    return found
