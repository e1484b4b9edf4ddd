"""Learning rates of float32: the rounding that a schedule may have where everything else is computed in float64.

Several frameworks keep the learning rate in float32, or compute the schedule in it. The weights then differ from the
reference's by more than their tolerance, in a way that twenty numbers describe: how far the rate of each step is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.tensors import relative_error
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.transformer.cases.case import STEPS, Case
from transformer_spec.training_config import TrainingConfig

DISTURBED = 1e-9  # relative: how far a rate is moved to measure its effect
ITERATIONS = 4  # of the fit, because an effect is not quite proportional to its cause
ROUNDED = 1e-4  # relative: rates of float32 leave less in every tensor, so that a larger error has another cause


@dataclass(frozen=True)
class Scheduled(TrainingConfig):
    """Settings whose learning rates are multiples of those of the schedule."""

    factors: tuple[float, ...] = ()

    def learning_rate(self, step: int, d_model: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return super().learning_rate(step, d_model) * self.factors[step - 1]


def scheduled(case: Case, factors: tuple[float, ...]) -> Case:
    """Return a case whose learning rates are multiplied by a factor for each step."""
    settings = {entry.name: getattr(case.training, entry.name) for entry in fields(case.training)}
    return replace(case, settings=Scheduled(**settings, factors=factors))


def rounded_rates(
    case: Case, actual: Arrays, truth: Arrays, run: Callable[[Case], Arrays], last: int
) -> Iterator[tuple[float, ...]]:
    """Yield by which factors the rates of a port may differ from the schedule, if float32 explains all of them.

    A schedule of float64, rounded, takes one run to test. Otherwise the factors are fitted to the weights. They explain
    a port only if the reference, run with them, agrees with it.

    Args:
        case: What is trained.
        actual: The port's tensors.
        truth: The reference's tensors.
        run: Runs the reference in a case.
        last: The number of the last step.

    Yields:
        A factor for each step; none if a larger error, or one in the rates, has another cause.
    """
    names = [name for name in truth if " weight " in name and name in actual]
    if not names or any(relative_error(actual[name], truth[name]) > ROUNDED for name in names):
        return
    rates = [case.training.learning_rate(step, case.config.d_model) for step in range(1, last + 1)]
    yield tuple(float(np.float32(rate)) / rate for rate in rates)

    def weights(tensors: Arrays) -> ndarray:
        return np.concatenate([np.ravel(tensors[name]) for name in names])

    def trained(off: ndarray) -> ndarray:
        return weights(run(replace(scheduled(case, tuple((1.0 + off).tolist())), calls=())))

    usual, wanted, off = weights(truth), weights(actual), np.zeros(last)
    effects = np.stack([(trained(DISTURBED * one) - usual) / DISTURBED for one in np.eye(last)], 1)
    inverse = np.linalg.pinv(effects)
    for _ in range(ITERATIONS):
        off = off + inverse @ (wanted - trained(off))
        if not np.abs(off).max() <= POLICY[STEPS]["float64"]["rate"]:
            return
    yield tuple((1.0 + off).tolist())
