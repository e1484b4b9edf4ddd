"""The learning rate, measured: how far the weights move in the first step, and how far they should.

Adam's first step does not depend on the size of a gradient: where every weight moves the right way, and all by the same
factor too far, the rate of that step is wrong by this factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.blame import distance
from transformer_parity.transformer.diagnose.trials import TRUTH, observed
from transformer_parity.transformer.mistakes.mistake import Mistake
from transformer_parity.transformer.mistakes.optimizer import rate
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.rates import scheduled
from transformer_parity.transformer.stages.steps import SNAPSHOTS, shifted
from transformer_parity.transformer.stages.training_stage import LOSS, WHOLE, is_noise
from transformer_spec.names import find

Arrays = Mapping[str, ndarray]
EXACT, SURE = 1e-9, 1e-4  # relative
ROUNDED = 1e-6  # relative: rates of float32 are off by less
ITERATIONS, PRECISE, FARTHEST = 12, 1e-14, 1e3  # of Newton's method; relative, of a loss; times the right rate
EXPLAINED = 1e-7  # relative: by how much a rate and its rounding may still be off where a loss hardly depends on it
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
    """Say which learning rates are wrong, or how far the first step is too long; empty if neither can be measured."""
    if case.settings is None:
        return ""
    factors = measured_factors(case, shown)
    if factors:
        return f"in {case.name}, {_of_factors(factors)}; with these rates, everything else is right: {SCHEDULE}"
    first, *later = _moved(case, shown)
    if not math.isfinite(first) or abs(first - 1.0) <= ROUNDED:
        return ""
    listed = ", ".join(f"{moved:.2g} after {step}" for step, moved in zip(SNAPSHOTS[1:], later, strict=True))
    factor = f"step 1 moves every weight the right way and {first:.6g} times as far as it should (about {listed} steps)"
    cause = "this is no constant factor of the learning rate: look at momentum, bias corrections, and the step counter"
    if all(math.isclose(moved, first, rel_tol=0.2) for moved in later):
        cause = SCHEDULE
    return f"in {case.name}, {factor}: {cause}"


def _of_factors(factors: Sequence[float]) -> str:
    """Describe the factors of the rates of all steps."""
    wrong = [step for step, factor in enumerate(factors, 1) if abs(factor - 1.0) > ROUNDED]
    if not wrong:
        most = max(abs(factor - 1.0) for factor in factors)
        return f"learning rates are off by up to {most:.0e}, as where a schedule is computed in float32"
    values = [factors[step - 1] for step in wrong]
    if max(values) - min(values) > ROUNDED:
        listed = ", ".join(f"{factors[step - 1]:.6g} times in step {step}" for step in wrong[:4])
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        return f"{len(wrong)} of {len(factors)} learning rates are wrong ({listed}{more})"
    times = f"{values[0]:.6g} times as large as it should be"
    if len(wrong) == len(factors):
        return f"the learning rate of every step is {times}"
    if wrong == list(range(wrong[0], len(factors) + 1)):
        return f"the learning rate is right up to step {wrong[0] - 1}, and {times} from step {wrong[0]} on"
    return f"the learning rate is {times} in step {', '.join(map(str, wrong[:8]))}, and right in all other steps"


def measured_factors(case: Case, shown: Arrays) -> tuple[float, ...]:
    """Return how many times as large as it should be the learning rate of each step is.

    The loss of a step depends on the rate of the step before it: one rate after another is found by Newton's method,
    and the last by how far the weights move. The reference must then reproduce the port's losses and weights.

    Returns:
        A factor for each step; none if no rates explain all tensors.
    """
    batches, last = shifted(case.inputs, case.rows), SNAPSHOTS[-1]
    loaded = DEFINITION.load(case.config, case.load_weights(), Placement("float64"))
    trainer, factors = loaded.trainer(case.training), list[float]()
    for step in range(1, last + 1):
        before = loaded.export()
        trainer.train_step(**batches[step % len(batches)])
        moves = {name: array - before[name] for name, array in loaded.export().items()}
        factor = _by_weights(shown, step, before, moves) if step in SNAPSHOTS else factors[-1]
        for _ in range(ITERATIONS if step < last else 1):
            for name, start in before.items():
                find(loaded.model, name)[...] = start + factor * moves[name]
            if step == last or not math.isfinite(factor):
                break
            found = loaded.gradients(batches[(step + 1) % len(batches)])
            off = found.loss - float(shown.get(f"step {step + 1} {LOSS}", math.nan))
            slope = sum(float(np.vdot(found.parameters[name], move)) for name, move in moves.items())
            if abs(off) <= PRECISE * abs(found.loss) or slope == 0.0:
                break
            factor -= off / slope
        if not abs(factor) <= FARTHEST:
            return ()
        factors.append(factor)
    explained = observed(TRUTH, scheduled(case, tuple(factors))) or {}
    is_explained = all(distance(name, shown, explained) <= EXPLAINED for name in shown if name != WHOLE)
    return tuple(factors) if is_explained else ()


def _by_weights(shown: Arrays, step: int, before: Arrays, moves: Arrays) -> float:
    """Return how far the weights have moved in a step, relative to the reference; 1 if they are not shown."""
    names = {name: f"step {step} weight {name}" for name in moves if not is_noise(name)}
    if not all(tap in shown and shown[tap].shape == moves[name].shape for name, tap in names.items()):
        return 1.0
    moved = sum(float(np.vdot(shown[tap] - before[name], moves[name])) for name, tap in names.items())
    return moved / max(sum(float(np.vdot(moves[name], moves[name])) for name in names), 1e-300)


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
