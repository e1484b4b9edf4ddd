"""Measure the learning rate that a port uses in each step.

The direction of an Adam step doesn't depend on the learning rate, so the rate can be derived from the weights after the
step. If the port doesn't return these weights, the rate is derived from the loss in the next step. The measured
rates are accepted only if the reference, trained with these rates, reproduces all of the port's losses and weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy import ndarray

from reference_numpy.training import Trainer, cross_entropy
from reference_numpy.transformer import Transformer
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.evidence.closeness import best_factor
from transformer_parity.transformer.stages.steps import shifted
from transformer_spec.names import find

Arrays = Mapping[str, ndarray]
FITTED = 1e-8  # relative tolerance within which the measured rates must reproduce losses and weights
SOLVED = 1e-14  # relative error of a loss at which the solver stops
TRIES = 40  # iterations of the secant method
FLOAT32 = 1e-6  # relative tolerance for comparing two rates
LISTED = 5  # maximum number of rates or factors in a sentence


def measured_rates(case: Case, shown: Arrays) -> list[float]:
    """Return the learning rate at each step, or an empty list if no rates reproduce all losses and weights.

    Multiple rates can lead to the same loss, so the result depends on the initial guess for each rate. The function
    tries three guesses: the rate of the previous step, the scheduled rate multiplied by the factor of the previous
    step, and the scheduled rate.

    Args:
        case: A training case.
        shown: The port's tensors.
    """
    later_weights = [name for name in shown if " weight " in name and not name.startswith("step 1 ")]
    if not later_weights:  # without weights after step 1, measured rates can't be verified
        return []
    shapes = {name: array.shape for name, array in case.load_weights().items()}
    if any(np.shape(shown[name]) != shapes.get(name.rpartition(" ")[2]) for name in later_weights):
        return []
    last = max(int(name.split()[1]) for name in shown if name.startswith("step "))
    usual = [_usual(case, step) for step in range(1, last + 1)]

    def same_multiple(rates: list[float]) -> float:
        return rates[-1] / usual[len(rates) - 1] * usual[len(rates)]

    guesses: tuple[Callable[[list[float]], float], ...] = (
        lambda rates: rates[-1],
        same_multiple,
        lambda rates: usual[len(rates)],
    )
    return next(filter(None, (_fitted(case, shown, usual, guess) for guess in guesses)), [])


def _fitted(case: Case, shown: Arrays, usual: Sequence[float], guess: Callable[[list[float]], float]) -> list[float]:
    """Return the rate in each step, or [] if no rates reproduce the port's tensors.

    ``guess`` returns the initial guess for a rate, based on the earlier rates.
    """
    weights = case.load_weights()
    model = Transformer.from_weights(case.config, weights, "float64")
    trainer, parameters = Trainer(model, case.training), {name: find(model, name) for name in weights}
    batches, rates = shifted(case.inputs, case.rows), list[float]()
    for step, rate in enumerate(usual, 1):
        if case.restart and step == case.restart + 1:
            trainer = Trainer(model, case.training)
        before = {name: array.copy() for name, array in parameters.items()}
        loss = trainer.train_step(**batches[step % len(batches)]).loss
        if not math.isclose(loss, shown.get(f"step {step} loss", math.nan), rel_tol=FITTED):
            return []
        moves = {name: array - before[name] for name, array in parameters.items()}

        def move(factor: float, before: Arrays = before, moves: Arrays = moves) -> None:
            for name, array in parameters.items():
                array[...] = before[name] + factor * moves[name]

        after = {name: shown[tap] for name in moves if (tap := f"step {step} weight {name}") in shown}
        if after:
            factor = _projected({name: array - before[name] for name, array in after.items()}, moves)
        else:
            batch, wanted = batches[(step + 1) % len(batches)], float(shown.get(f"step {step + 1} loss", math.nan))

            def missed(factor: float, batch: Arrays = batch, wanted: float = wanted) -> float:
                move(factor)
                return _loss(model, batch) - wanted

            factor = _solved(missed, guess(rates) / rate if rates else 1.0, SOLVED * abs(wanted))
        if not math.isfinite(factor):
            return []
        move(factor)
        if any(
            not np.linalg.norm(parameters[name] - array) <= FITTED * np.linalg.norm(array)  # also true for NaN
            for name, array in after.items()
        ):
            return []
        rates.append(factor * rate)
    return rates


def _projected(moved: Arrays, moves: Arrays) -> float:
    """Return the ratio of the weight changes in the port to the weight changes in the reference (least squares)."""
    ours, theirs = (np.concatenate([np.ravel(one[name]) for name in moved]) for one in (moves, moved))
    return best_factor(theirs, ours) if ours.any() and ours.shape == theirs.shape else math.nan


def _loss(model: Transformer, batch: Arrays) -> float:
    """Return the loss per token of a batch."""
    total, tokens = cross_entropy(model(batch["source_ids"], batch["target_ids"]), batch["labels"], model.config)
    return float(total / max(int(tokens), 1))


def _solved(missed: Callable[[float], float], start: float, tolerance: float) -> float:
    """Return a zero of a function, found by the secant method, or NaN if the method doesn't converge."""
    one, other = start, start + 0.01
    at_one, at_other = missed(one), missed(other)
    for _ in range(TRIES):
        if abs(at_one) <= tolerance:
            return one
        if at_one == at_other:
            break
        one, other = one - at_one * (one - other) / (at_one - at_other), one
        at_one, at_other = missed(one), at_one
    return math.nan


def _usual(case: Case, step: int, factor: int = 1, shift: int = 0) -> float:
    """Return the scheduled learning rate for the step number ``factor * n + shift``.

    ``n`` is the number of the step, counted from the last restart.
    """
    n = step - case.restart if case.restart and step > case.restart else step
    number = factor * n + shift
    return case.training.learning_rate(number, case.config.d_model) if number > 0 else 0.0


def schedule_in_words(case: Case, rates: Sequence[float]) -> str:
    """Describe measured learning rates with as few numbers as possible.

    Return an empty string if there are no rates or if they are correct.

    Args:
        case: The training case.
        rates: The rate of each step.
    """
    if not rates:
        return ""
    k, rounding = case.training.accumulation_steps, FLOAT32 * max(rates)
    numbers = {"n": (1, 0), "n - 1": (1, -1), "n + 1": (1, 1), "n - 2": (1, -2), "n + 2": (1, 2)}
    numbers |= {
        f"{k} * n": (k, 0),
        f"{k} * (n - 1)": (k, -k),
    }
    numbers |= {f"{k} * (n - 1) + 1": (k, 1 - k)}
    for words, (factor, shift) in numbers.items():
        expected = [_usual(case, step, factor, shift) for step in range(1, len(rates) + 1)]
        if np.allclose(rates, expected, FLOAT32, rounding):
            # If the rates are correct, the difference has a different cause.
            return "" if words == "n" else f"step n uses settings.learning_rate({words}, d_model)"
    factors = [rate / _usual(case, step) for step, rate in enumerate(rates, 1)]
    by_factor, by_rate = _runs(factors), _runs(rates)
    right = ""
    if len(by_rate) < len(by_factor):
        first = next(step for step, factor in enumerate(factors, 1) if not math.isclose(factor, 1.0, rel_tol=FLOAT32))
        runs = [run for run in by_rate if run[2] >= first] if len(by_rate) > LISTED else by_rate
        words, right = _listed(runs), f"correct up to step {first - 1}, and " if runs != by_rate else ""
    else:
        runs, words = by_factor, f"settings.learning_rate(n, d_model) times {_listed(by_factor)}"
    if len(runs) > LISTED:  # a wrong bias correction has the same effect
        steps = f"the steps of the port are {right}as large as with the learning rates {words}"
        return f"{steps}: the learning rate or a bias correction differs"
    return f"the learning rate of the port is {right}{words}"


def _runs(values: Sequence[float]) -> list[tuple[str, int, int]]:
    """Return each run of equal values: the value, rounded to five digits, and the first and last step of the run."""
    steps = enumerate((f"{value if abs(value) > FLOAT32 * max(values) else 0:.5g}" for value in values), 1)
    runs = [(value, [step for step, _ in some]) for value, some in groupby(steps, key=lambda one: one[1])]
    return [(value, some[0], some[-1]) for value, some in runs]


def _listed(runs: Sequence[tuple[str, int, int]]) -> str:
    said = [
        f"{value} in step {first}" if first == last else f"{value} in steps {first} to {last}"
        for value, first, last in runs
    ]
    return ", ".join(said[:LISTED]) + (", ..." if len(said) > LISTED else "")
