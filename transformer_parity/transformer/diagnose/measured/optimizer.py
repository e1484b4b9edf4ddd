"""Measure a port's optimizer settings (betas, epsilon, and clip norm), and the size of each tensor's update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.signatures import SAME
from transformer_parity.transformer.bugs.bug import Bug, instead
from transformer_parity.transformer.bugs.candidates.step_variants import of_gradient
from transformer_parity.transformer.bugs.optimizer import assumed
from transformer_parity.transformer.bugs.other_optimizers import T, formulas
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, Attempt, Trials, observed
from transformer_parity.transformer.diagnose.evidence.closeness import best_factor
from transformer_parity.transformer.diagnose.evidence.differing import described
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.steps import train
from transformer_parity.transformer.stages.training_stage import LOSS, is_noise

Arrays = Mapping[str, ndarray]
BETAS = {"beta1": (0.9, 0.95, 0.85, 0.5), "beta2": (0.98, 0.99, 0.999, 0.95)}  # from published recipes
EPSILONS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-9, 1e-10, 1e-12, 1e-16)  # 1e-8 is already in the bug catalog
CLOSE = 1e-3  # relative tolerance for a measured bias correction; the effect of epsilon is smaller
GROUPS = 3  # maximum number of different factors in a sentence
COUNTED = 200  # a measured bias correction is compared with the bias corrections of all step numbers below this limit
RANGES = {  # ranges of log(epsilon), log(1 - beta), and log(clip norm / norm of the first gradient)
    "beta2": (math.log(1e-4), math.log(0.999)),
    "beta1": (math.log(1e-3), math.log(0.9999)),
    "epsilon": (math.log(1e-14), math.log(1.0)),
    "clip_norm": (math.log(1e-6), math.log(1.0)),
}
GRID, BISECTIONS, ROOTS = 10, 40, 2
SOLVED = 1e-15  # relative error of a loss at which the solver stops
MOST = 12  # significant digits of a measured value


def optimizer_candidates(case: Case, shown: Arrays) -> list[Bug]:
    """Return candidates with common optimizer settings, and candidates that explain the weights after step 1."""
    if case.settings is None:
        return []
    return [*_common_settings(case), *_by_tensor(case, shown)]


def _common_settings(case: Case) -> Iterator[Bug]:
    """Yield candidates with values that ports often hard-code instead of using the given settings."""
    given = case.training
    betas = [{"beta1": one, "beta2": two} for one, two in product(*BETAS.values())]
    betas += [{name: value} for name, values in BETAS.items() for value in values]
    for some in (*betas, *({"epsilon": value} for value in EPSILONS)):
        if some != {"beta2": 0.999} and any(getattr(given, name) != value for name, value in some.items()):
            yield Bug(" and ".join(f"{name} {value:g}" for name, value in some.items()), "", assumed(**some))


def _by_tensor(case: Case, shown: Arrays) -> Iterator[Bug]:
    """Yield candidates that scale the updates of some tensors by a wrong factor, or that never update these tensors."""
    usual, start = observed(TRUTH, case) or {}, case.load_weights()
    names = [name for name in start if not is_noise(name)]
    taps = {name: f"step 1 weight {name}" for name in names}
    still = {}
    if not all(tap in shown and tap in usual and shown[tap].shape == usual[tap].shape for tap in taps.values()):
        last = max((int(name.split()[1]) for name in shown if " weight " in name), default=0)
        at_end = {name: shown.get(f"step {last} weight {name}") for name in names}
        still = {
            name: 0.0 for name, array in at_end.items() if array is not None and np.array_equal(array, start[name])
        }
        if still and len(still) < len(names):
            yield from _multiplied(still, names)
        return
    moved = {name: shown[tap] - start[name] for name, tap in taps.items()}
    right = {name: usual[tap] - start[name] for name, tap in taps.items()}
    if not all(np.isfinite(move).all() for move in moved.values()):
        return
    factors = {name: best_factor(moved[name], x) for name, x in right.items()}
    far = {name: np.linalg.norm(moved[name] - factors[name] * x) for name, x in right.items()}
    # ``least`` is the expected rounding error of each movement. It is significant only if a weight barely changes.
    least = {name: 1e-15 * np.linalg.norm(start[name]) for name in names}
    if all(far[name] <= SAME * np.linalg.norm(right[name]) + least[name] for name in names):
        other = {name: factor for name, factor in factors.items() if abs(factor - 1.0) > 1e-7}
        if other and len(other) < len(names):
            yield from _multiplied(other, names)
    yield from _counters(case, {name: _median_ratio(moved[name], right[name]) for name in names})


def _multiplied(factors: Mapping[str, float], every: list[str]) -> Iterator[Bug]:
    """Yield bugs that multiply the updates of some tensors by a factor, which is 0 for tensors that never change."""
    rounded = {name: float(f"{factor:.6g}") for name, factor in factors.items()}
    groups = {value: [name for name in rounded if rounded[name] == value] for value in rounded.values()}
    if len(groups) > GROUPS:
        return
    of_group = {value: described(names, every) for value, names in groups.items()}
    words = [
        f"steps of {some} multiplied by {value:g}" if value else f"{some} never updated"
        for value, some in of_group.items()
    ]
    literal = repr(rounded).replace("{", "{{").replace("}", "}}")
    yield Bug(" and ".join(words), "", formulas(theta=f"theta -= {literal}.get(name, 1.0) * step"))
    if groups.keys() == {0.0}:  # a missing gradient also changes the gradient norm, and therefore clipping
        line = f"gradient = {{name: g * (name not in {list(rounded)!r}) for name, g in gradient.items()}}"
        yield Bug(f"{of_group[0.0]} without a gradient in training", "", of_gradient(line))


def _median_ratio(moved: ndarray, right: ndarray) -> float:
    some = np.abs(right) > 0.1 * np.abs(right).max()
    return float(np.median(moved[some] / right[some])) if some.any() else math.nan


def _counters(case: Case, ratios: Mapping[str, float]) -> Iterator[Bug]:
    """Yield candidates whose bias corrections use a different step number for each tensor.

    The function derives these step numbers from the weights after the first training step.
    """
    beta1, beta2 = case.training.beta1, case.training.beta2
    steps = np.arange(1, COUNTED)
    of_steps = (1.0 - beta1) / (1.0 - beta1**steps) * np.sqrt((1.0 - beta2**steps) / (1.0 - beta2))
    counts = {}
    for name, ratio in ratios.items():
        nearest = int(np.abs(of_steps - ratio).argmin()) if math.isfinite(ratio) else 0
        if not math.isclose(of_steps[nearest], ratio, rel_tol=CLOSE):
            return
        counts[name] = nearest + 1
    if len(set(counts.values())) < GROUPS:
        return
    literal = repr(counts).replace("{", "{{").replace("}", "}}")
    for words, step in {
        "restarts in every step": "t - 1",
        **{
            f"never restarts, with {n} tensors": f"(t - 1) * {n}"
            for n in {max(counts.values()), len(case.load_weights())}
        },
    }.items():
        count = f"{T}\nt = {step} + {literal}.get(name, 1)"
        yield Bug(
            f"a bias-correction counter that increases with every tensor and {words}",
            "",
            formulas(m_hat=f"{count}\nm_hat = m / (1.0 - beta1**t)", v_hat="v_hat = v / (1.0 - beta2**t)"),
        )


def measured_number(trials: Trials) -> Attempt | None:
    """Find the value of one optimizer setting with which the reference reproduces every tensor of a case.

    Return None if there is no such value.

    In a single case, a larger epsilon can have the same effect as a smaller clip norm. Therefore, the function prefers
    a setting that explains all cases.

    Args:
        trials: The port's tensors in a training case.
    """
    case = trials.case
    if case.settings is None or case.restart or not any(" weight " in name for name in trials.names):
        return None
    wrong = (name for name in trials.differing(TRUTH) if name.endswith(f" {LOSS}"))
    first = min((int(name.split()[1]) for name in wrong), default=0)
    names = [name for name in RANGES if getattr(case.training, name) is not None] if first > 1 else []
    found = [attempt for name in names for attempt in _fitted(trials, name, first)]
    return next((one for one in found if trials.holds_elsewhere(one.candidate)), found[0] if found else None)


def _fitted(trials: Trials, name: str, step: int) -> Iterator[Attempt]:
    """Find values of a setting that reproduce the port's loss in a step, and try them.

    Yield the attempts that reproduce every tensor.
    """
    case, truth, loss = trials.case, observed(TRUTH, trials.case) or {}, f"step {step} {LOSS}"
    norm = float(truth["step 1 norm of the gradient"])

    def number(u: float) -> float:
        return {"epsilon": math.exp(u), "clip_norm": norm * math.exp(u)}.get(name, 1.0 - math.exp(u))

    def missed(u: float) -> float:
        changed: dict[str, Any] = {name: number(u)}
        other = replace(case, settings=replace(case.training, **changed), calls=())
        loaded = DEFINITION.load(case.config, case.load_weights(), Placement("float64"))
        with np.errstate(all="ignore"):
            return float(train(other, loaded, range(1, step + 1), ())[loss] - trials.actual[loss])

    for u in _roots(missed, *RANGES[name], SOLVED * abs(float(truth[loss]))):
        if found := _confirmed(trials, name, number(u)):
            yield found


def _confirmed(trials: Trials, name: str, value: float) -> Attempt | None:
    """Round a measured value, try a candidate with the rounded value, and return the attempt.

    The function rounds to the smallest number of digits with which the candidate reproduces every tensor. If ``MOST``
    digits aren't enough, it returns None. If multiple candidates use the rounded value, the function prefers a
    candidate that also reproduces all other cases.
    """
    usual = getattr(trials.case.training, name)

    def rounded(digits: int) -> float:
        other = 1.0 - float(f"{1.0 - value:.{digits}g}") if name.startswith("beta") else float(f"{value:.{digits}g}")
        return float(f"{other:.{MOST}g}")

    def instead_of_usual(other: float) -> Candidate:
        return Candidate((Bug(f"{name} {other:.{MOST}g} instead of {usual:g}", "", assumed(**{name: other})),))

    def explains(digits: int) -> bool:
        attempt = trials.run(instead_of_usual(rounded(digits)))
        return attempt is not None and attempt.is_exact

    if not explains(MOST):
        return None
    shortest = rounded(next(filter(explains, range(1, MOST + 1))))  # rounding removes the measurement error
    choices = [instead_of_usual(shortest), *_of_clipping(name, shortest, usual)]
    return trials.run(next((one for one in choices if trials.holds_elsewhere(one)), choices[0]))


def _of_clipping(name: str, value: float, usual: float) -> Iterator[Candidate]:
    """If clipping is enabled, yield candidates that set the clip norm to a constant or multiply it by a factor."""
    value, multiple = (float(f"{number:.10g}") for number in (value, value / usual))
    for words, other in (
        {
            f"a clip norm of {value:g}, if clipping is on": repr(value),
            f"a clip norm multiplied by {multiple:g}": f"settings.clip_norm * {multiple!r}",
        }.items()
        if name == "clip_norm"
        else ()
    ):
        new = f"type(settings)(**{{**settings.to_dict(), 'clip_norm': settings.clip_norm and {other}}})"
        edits = instead("training", "self.settings = settings\n", f"self.settings = settings = {new}\n")
        yield Candidate((Bug(words, "", edits),))


def _roots(missed: Callable[[float], float], low: float, high: float, tolerance: float) -> Iterator[float]:
    """Yield points at which a function changes sign. The method is regula falsi with the Illinois modification."""
    grid = np.linspace(low, high, GRID).tolist()
    values = [missed(u) for u in grid]
    brackets = [i for i in range(GRID - 1) if values[i] * values[i + 1] < 0.0]
    for i in brackets[:ROOTS]:
        (a, b), (fa, fb), side = grid[i : i + 2], values[i : i + 2], 0
        for _ in range(BISECTIONS):
            u = (fa * b - fb * a) / (fa - fb)
            fu = missed(u)
            if abs(fu) <= tolerance or abs(b - a) < 1e-14:
                break
            if fu * fb > 0.0:
                b, fb, fa, side = u, fu, fa / 2.0 if side == -1 else fa, -1
            else:
                a, fa, fb, side = u, fu, fb / 2.0 if side == 1 else fb, 1
        yield u
