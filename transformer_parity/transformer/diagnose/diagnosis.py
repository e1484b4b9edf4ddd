"""The search for a change of the reference that reproduces a port's numbers: a mistake, a convention, or a number.

``diagnose`` runs the reference with each known mistake and convention, with numbers that are measured, and with several
changes together. It returns the change that reproduces all numbers of the port, or else "unknown". The
docstring of ``investigate`` lists all steps of a diagnosis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from numpy import ndarray

from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS, Case
from transformer_parity.transformer.diagnose.hypotheses.hypothesis import Hypothesis, hypotheses, is_convention
from transformer_parity.transformer.diagnose.hypotheses.places import Place, at_single_places
from transformer_parity.transformer.diagnose.hypotheses.several import PROMISING, clash, combinations, simplest
from transformer_parity.transformer.diagnose.hypotheses.trials import TRUTH, Attempt, Trials
from transformer_parity.transformer.diagnose.measured.optimizer import measured_number, optimizer_hypotheses
from transformer_parity.transformer.diagnose.measured.schedule import measured_rates, schedule_in_words
from transformer_parity.transformer.diagnose.measured.search import search_hypotheses
from transformer_parity.transformer.diagnose.measured.search_parameters import fitting_parameters
from transformer_parity.transformer.diagnose.measured.step import (
    decay_hypotheses,
    embedding_factor,
    float32_positions,
    position_angles,
    rate_hypotheses,
    wavelength_hypotheses,
)
from transformer_parity.transformer.mistakes.catalogue import STEP_VARIANTS
from transformer_parity.transformer.mistakes.mistake import Mistake
from transformer_parity.transformer.stages.decode import TOKENS
from transformer_parity.transformer.stages.training_stage import LOSS

Arrays = Mapping[str, ndarray]
EXACT, LIKELY, UNKNOWN = "exact", "likely", "unknown"
VARIANTS = {mistake.name for mistake in STEP_VARIANTS}
EXACTLY, CHANGED = "behaves exactly like", "the reference with this change"
PLACED = 1000  # attempts with one mistake at single places
# What a tap shows by its name, where published code often has another value at hand.
MEANINGS = {
    "_norm.output": "the norm's own output; in post-norm, of the sum",
    ".scores": "scaled, and before the mask",
    ".weights": "after the softmax, and before dropout",
    ".inner": "after the activation",
}


@dataclass(frozen=True)
class Diagnosis:
    """What a port does, as far as its numbers show.

    Attributes:
        sentence: In words; of several statements, the one with the strongest evidence.
        confidence: ``exact`` where a hypothesis reproduces every number, ``likely`` where something else was measured
            that points to a cause, or ``unknown``.
        hypotheses: Those that reproduce every number, or every case that differs; several if nothing tells them apart.
        error: The largest relative error that the first of them leaves; infinite if there is none.
        runner_up: The next best.
        next_error: What it leaves, at the first tensor that it does not reproduce or in the last.
        signatures: Further statements, each with its evidence, in the order of strength.
        config: The fields of the config by which a port declares what it does; empty if it is a mistake.
    """

    sentence: str
    confidence: str
    hypotheses: tuple[str, ...] = ()
    error: float = math.inf
    runner_up: str = ""
    next_error: float = math.inf
    signatures: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    to_dict = asdict  # the fields as plain values


def diagnose(
    case: Case,
    actual: Arrays,
    port: str,
    progress: Callable[[str], None] = lambda text: None,
    known: Sequence[Mistake] | None = None,
    others: Sequence[tuple[Case, Arrays | None]] = (),
) -> Diagnosis:
    """Find the hypothesis that reproduces every tensor of a port.

    If none does in activations, it omits the tensors of the kind that differs first, and then all except the output,
    because a tap may show a different value than its name promises.

    Args:
        case: What was run.
        actual: What the port showed in float64, in the order of computation (see ``outputs.tensors``).
        port: What to call it.
        progress: Receives what is tried next.
        known: The mistakes and conventions to try; None is all that are known.
        others: Cases of the same model that an exact hypothesis has to reproduce too, with what the port showed there;
            None where it agrees with the reference.
    """
    known = hypotheses(case.config, case.stage) if known is None else known
    trials = Trials.of(case, actual, others)
    start = trials.run(TRUTH)
    if start is None or start.is_exact:
        return Diagnosis(f"every number that {port} shows here is right", UNKNOWN)
    # Learning rates, or another number of the optimizer, that explain this case of training.
    deviation = schedule_in_words(case, measured_rates(case, actual))
    rates = rate_hypotheses(case, actual)
    measured = [*rates, *optimizer_hypotheses(case, actual)]
    known = [*known, *decay_hypotheses(case, actual), *search_hypotheses(case, actual)]
    known += wavelength_hypotheses(case, actual)
    progress(f"{len(known) + len(measured)} hypotheses")
    places = tuple if deviation else partial(at_single_places, case, actual, known)
    if found := _apart_from_loss(trials, known, port, progress, places):
        return found
    if found := _named_in_search(trials, known, port, progress):
        return found
    exact, tried = _search(trials, start, [*known, *measured], progress, places, together=False)
    if not exact and not deviation and (number := measured_number(trials)):
        exact, deviation = [number], f"it has {number.hypothesis.name}"
    # Each set of mistakes takes a training. If the rate is wrong, sets would only guess at the schedule.
    if not exact and not (rates or deviation):
        exact, several = _together(trials, start, tried, known, progress)
        tried += several
    confirmed = [attempt for attempt in exact if trials.holds_elsewhere(attempt.hypothesis)]
    if confirmed:
        return _exact(port, confirmed, tried)
    if deviation:
        return Diagnosis(f"in {case.name}, {port} trains exactly like the reference, except that {deviation}", EXACT)
    if not exact and case.stage == ACTIVATIONS and (found := _by_fewer_tensors(trials, start, known, port, progress)):
        return found
    if pairs := _and_another(trials, exact, known, progress):
        return _exact(port, pairs, tried)
    # Several mistakes together fit one case by chance. If only tokens are shown, a single mistake can too.
    singles = [attempt for attempt in exact if len(attempt.hypothesis.parts) == 1 and trials.names != (TOKENS,)]
    sometimes = [one for one in singles if trials.differing_cases().holds_elsewhere(one.hypothesis)]
    if sometimes:
        name = sometimes[0].hypothesis.name
        sentence = f"some cases agree; in those of {case.stage} that differ, {port} behaves like {CHANGED}: {name}"
        return Diagnosis(sentence, LIKELY, (name,), sometimes[0].worst)
    for positions_of in (float32_positions, embedding_factor, position_angles):
        if positions := positions_of(trials, trials.names[start.matched], port):
            return Diagnosis(positions, LIKELY)
    return _unknown([attempt for attempt in tried if attempt not in exact], start, case.stage == ACTIVATIONS)


def _apart_from_loss(
    trials: Trials,
    known: Sequence[Mistake],
    port: str,
    progress: Callable[[str], None],
    places: Callable[[], Sequence[tuple[Mistake, Place]]],
) -> Diagnosis | None:
    """Search by the losses only if only they differ, and by the gradients only if the loss is right.

    Returns:
        None if loss and gradients differ, or if that shows no more.
    """
    wrong, losses = set(trials.differing(TRUTH)), {name for name in trials.names if name.endswith(LOSS)}
    if losses and wrong <= losses:
        rest, note = trials.without(set(trials.names) - losses), "; only the loss differs: its gradient is right"
    elif losses and wrong.isdisjoint(losses) and trials.case.stage == GRADIENTS:
        rest, note = trials.without(losses), "; only the gradients differ: the loss is right"
    else:
        return None
    usual = rest.run(TRUTH)
    if usual is None:
        return None
    exact, tried = _search(rest, usual, known, progress, places, together=False)
    confirmed = [attempt for attempt in exact if rest.holds_elsewhere(attempt.hypothesis)]
    of_both = [one for one in confirmed if (found := trials.run(one.hypothesis)) and found.is_exact]
    if not confirmed:
        return None
    if of_both:
        return _exact(port, of_both, tried)
    return replace(_exact(port, confirmed, tried, note), config={})  # in one of the two, no config has this effect


def _named_in_search(
    trials: Trials, known: Sequence[Mistake], port: str, progress: Callable[[str], None]
) -> Diagnosis | None:
    """Name one mistake or one number of a search: in all searches, or else only in greedy or beam search.

    Returns:
        None if none explains the tokens, or if the case has no search.
    """
    if trials.case.search is None:
        return None
    kinds = [trials, *filter(None, [trials.for_same_kind_of_search()])]
    tried = [attempt for mistake in known if (attempt := trials.run(Hypothesis((mistake,))))]
    exact = [attempt for attempt in tried if attempt.is_exact]
    confirmed = [[one for one in exact if some.holds_elsewhere(one.hypothesis)] for some in kinds]
    alike = EXACTLY
    if not any(confirmed):
        progress("the numbers of a search")
        confirmed, alike = list(fitting_parameters(trials, kinds)), "returns the same tokens as"
    for some, found in zip(kinds, confirmed, strict=True):
        if found and some is trials:
            return _exact(port, found, tried, alike=alike)
        if found:
            kind = "greedy" if trials.case.options.beam_size is None else "beam"
            diagnosis = _exact(port, found, tried, alike=alike)
            names = tuple(f"{name}, in {kind} search only" for name in diagnosis.hypotheses)
            sentence = f"in {kind} search, {diagnosis.sentence}"
            return replace(diagnosis, sentence=sentence, hypotheses=names, config={})
    return None


def reproducing_output(case: Case, actual: Arrays, known: Sequence[Mistake]) -> list[Hypothesis]:
    """Return the single hypotheses that reproduce the output of a case, whatever they show at the taps."""
    trials = Trials(case, actual, (), (OUTPUT,))
    attempts = [trials.run(Hypothesis((mistake,))) for mistake in known]
    return [attempt.hypothesis for attempt in attempts if attempt and attempt.is_exact]


def _search(
    trials: Trials,
    start: Attempt,
    known: Sequence[Mistake],
    progress: Callable[[str], None],
    places: Callable[[], Sequence[tuple[Mistake, Place]]] = tuple,
    *,
    together: bool = True,
) -> tuple[list[Attempt], list[Attempt]]:
    """Return the hypotheses that reproduce every tensor, and all that were tried.

    One mistake in the whole model is tried first, then one at a single place, and then several together.
    """
    singles = [attempt for mistake in known if (attempt := trials.run(Hypothesis((mistake,))))]
    exact, tried = [attempt for attempt in singles if attempt.is_exact], list(singles)
    if not exact:
        progress("single places")
        exact, somewhere = _first_exact(trials, places())
        tried += somewhere
    if not exact and together:
        exact, several = _together(trials, start, tried, known, progress)
        tried += several
    return exact, tried


def _together(
    trials: Trials,
    start: Attempt,
    tried: Sequence[Attempt],
    known: Sequence[Mistake],
    progress: Callable[[str], None],
) -> tuple[list[Attempt], list[Attempt]]:
    """Return which several hypotheses at once reproduce every tensor, and all that were tried.

    Variants of a step are too many to be tried in pairs.
    """
    pairs = [mistake for mistake in known if mistake.name not in VARIANTS]
    singles = [one for one in tried if one.hypothesis.place is None and one.hypothesis.parts[0] in pairs]
    several: list[Attempt] = []
    for attempts in combinations(trials, start, singles, pairs, progress):
        several += attempts
        if exact := simplest([attempt for attempt in attempts if attempt.is_exact]):
            return exact, several
    return [], several


def _first_exact(trials: Trials, places: Sequence[tuple[Mistake, Place]]) -> tuple[list[Attempt], list[Attempt]]:
    """Return the mistakes at the largest places that reproduce every tensor, and all that were tried."""
    tried: list[Attempt] = []
    for _, same_size in itertools.groupby(places, lambda one: len(one[1].parts)):
        attempts = [found for mistake, place in same_size if (found := trials.run(Hypothesis((mistake,), place)))]
        tried += attempts
        if exact := [attempt for attempt in attempts if attempt.is_exact]:
            return exact, tried
        if len(tried) > PLACED:
            break
    return [], tried


def _and_another(
    trials: Trials, exact: Sequence[Attempt], known: Sequence[Mistake], progress: Callable[[str], None]
) -> list[Attempt]:
    """Return which hypotheses with another one hold in every case, where the first alone holds in this one only."""
    failing = [(case, shown) for case, shown in trials.others if shown is not None]
    for attempt in exact[:PROMISING]:
        if len(attempt.hypothesis.parts) > 1:  # several together fit one case by chance
            continue
        runs = ((one, Trials.of(*one).run(attempt.hypothesis)) for one in failing)
        there = next((one for one, run in runs if run is None or not run.is_exact), None)
        if there is None:
            continue
        progress(f"{attempt.hypothesis.name} and another")
        elsewhere = Trials.of(*there)
        both = [
            Hypothesis((*attempt.hypothesis.parts, one))
            for one in known
            if one.name not in VARIANTS and not clash(attempt.hypothesis.parts, one)
        ]
        both = [one for one in both if (seen := elsewhere.run(one)) is not None and seen.is_exact]
        fits = [found for one in both if (found := trials.run(one)) and found.is_exact and trials.holds_elsewhere(one)]
        if fits:
            return fits
    return []


def _by_fewer_tensors(
    trials: Trials, start: Attempt, known: Sequence[Mistake], port: str, progress: Callable[[str], None]
) -> Diagnosis | None:
    """Search without the tensors of the kind that differs first, and then among single hypotheses by the output alone.

    Returns:
        None if that shows no more.
    """
    first = trials.names[start.matched]
    kind = next((ending for ending in MEANINGS if first.endswith(ending)), "")
    if OUTPUT not in (differing := trials.differing(TRUTH)) and trials.without(differing).holds_elsewhere(TRUTH):
        meaning = f", which is to be {MEANINGS[kind]}" if kind else ""
        return Diagnosis(f"the output is right: of the taps, only {_counted(differing)} differ{meaning}", LIKELY)
    alike = [name for name in trials.names if kind and name.endswith(kind)]
    for left_out in (alike, [name for name in trials.names if name != OUTPUT]):
        rest = trials.without(left_out)
        usual = rest.run(TRUTH)
        if not left_out or usual is None or usual.is_exact:
            continue
        exact, tried = _search(rest, usual, known, progress, together=left_out is alike)
        confirmed = [attempt for attempt in exact if rest.holds_elsewhere(attempt.hypothesis)]
        if confirmed:
            note = f"; {_counted(left_out)} are not compared: they may show other values than their names stand for"
            return _exact(port, confirmed, tried, note)
    return None


def _counted(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more of this kind"


def _exact(
    port: str, exact: Sequence[Attempt], tried: Sequence[Attempt], note: str = "", alike: str = EXACTLY
) -> Diagnosis:
    """Name the hypotheses that reproduce every number, and the error of the next best one.

    If a convention does, mistakes at single places that are the same here are left out: it can be declared.
    """
    runner_up = _best([attempt for attempt in tried if not attempt.is_exact])
    if any(all(map(is_convention, attempt.hypothesis.parts)) for attempt in exact):
        exact = [one for one in exact if one.hypothesis.place is None or all(map(is_convention, one.hypothesis.parts))]
    names = tuple(dict.fromkeys(attempt.hypothesis.name for attempt in exact))
    error = exact[0].worst
    also = f", or {' or '.join(names[1:])}, which are the same here" if names[1:] else ""
    sentence = f"{port} {alike} {CHANGED}: {names[0]}{also} (error {error:.0e}"
    config = _convention(exact[0].hypothesis)
    if runner_up is None:
        return Diagnosis(f"{sentence}){note}", EXACT, names, error, config=config)
    name, left = runner_up.hypothesis.name, runner_up.worst
    return Diagnosis(f"{sentence}, next best {left:.0e}){note}", EXACT, names, error, name, left, config=config)


def _convention(hypothesis: Hypothesis) -> dict[str, Any]:
    """Return the fields of the config that declare what a port does; nothing if it is a mistake."""
    if hypothesis.place is not None or not all(map(is_convention, hypothesis.parts)):
        return {}
    return {name: value for part in hypothesis.parts for name, value in part.config.items()}


def _unknown(tried: Sequence[Attempt], start: Attempt, in_order: bool) -> Diagnosis:
    """Say that nothing reproduces the numbers; if each tensor follows from those before, also which come closest."""
    runner_up = _best(tried)
    name, left = (runner_up.hypothesis.name, runner_up.worst) if runner_up else ("", math.inf)
    sentence = "unknown: no known mistake or convention, nor several of them together, reproduces these numbers"
    further = max(tried, key=lambda attempt: attempt.matched, default=None)
    if in_order and further is not None and further.matched > start.matched:
        more = further.matched - start.matched
        right = "one more tensor is right" if more == 1 else f"{more} more tensors are right"
        sentence += f". With {further.hypothesis.name}, {right}"
    return Diagnosis(sentence, UNKNOWN, (), math.inf, name, left)


def _best(attempts: Sequence[Attempt]) -> Attempt | None:
    return min(attempts, key=lambda attempt: attempt.worst, default=None)
