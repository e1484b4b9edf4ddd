"""Detection of ports that round the learning rate to float32 but compute everything else in float64.

Several frameworks store the learning rate in float32 or compute the schedule in float32. As a result, the errors of the
weights exceed the tolerance. These errors depend only on the relative errors of the 20 learning rates.
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

DISTURBED = 1e-9  # relative change of a learning rate, to measure the effect on the weights
ITERATIONS = 4  # iterations of the fit; more than one, because the effects of learning rates aren't exactly linear
ROUNDED = 1e-4  # maximum relative error that rounded learning rates can cause in the weights


@dataclass(frozen=True)
class Scheduled(TrainingConfig):
    """Training settings in which the learning rate of each step is multiplied by a separate factor."""

    factors: tuple[float, ...] = ()

    def learning_rate(self, step: int, d_model: int) -> float:
        """Return the learning rate of a step. The first step is 1."""
        return super().learning_rate(step, d_model) * self.factors[step - 1]


def scheduled(case: Case, factors: tuple[float, ...]) -> Case:
    """Return a copy of a case in which the learning rate of each step is multiplied by a separate factor."""
    settings = {entry.name: getattr(case.training, entry.name) for entry in fields(case.training)}
    return replace(case, settings=Scheduled(**settings, factors=factors))


def rounded_rates(
    case: Case, actual: Arrays, truth: Arrays, run: Callable[[Case], Arrays], last: int
) -> Iterator[tuple[float, ...]]:
    """Yield candidates for the factors by which a port's learning rates differ from the schedule.

    The first tuple results from rounding the float64 learning rates to float32. The second tuple is fitted to the
    port's weights. The caller must run the reference with the factors of each tuple. If the reference's results then
    agree with the port's results, the factors explain the port's errors.

    Args:
        case: The training case.
        actual: The port's tensors.
        truth: The reference's tensors.
        run: A function that runs the reference on a case.
        last: Number of the last step.

    Yields:
        One factor per step. Yields nothing if the errors are too large to result from rounded learning rates.
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
