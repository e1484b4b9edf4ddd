"""Search for a change to the reference that reproduces a port's values: a bug, a convention, or a different setting.

``diagnose`` runs the reference with each known bug and convention, with settings that it derives from the port's
tensors, and with combinations of changes. It returns a ``Diagnosis``, which contains the changes that reproduce all of
the port's values. If there are none, its confidence is ``likely`` or ``unknown``. The docstring of ``investigate``
lists all steps of a diagnosis.
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
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.bugs.catalog import STEP_VARIANTS
from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS, Case
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate, candidates, is_convention
from transformer_parity.transformer.diagnose.candidates.places import Place, at_single_places
from transformer_parity.transformer.diagnose.candidates.several import PROMISING, clash, combinations, simplest
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, Attempt, Trials
from transformer_parity.transformer.diagnose.measured.optimizer import measured_number, optimizer_candidates
from transformer_parity.transformer.diagnose.measured.schedule import measured_rates, schedule_in_words
from transformer_parity.transformer.diagnose.measured.search import search_candidates
from transformer_parity.transformer.diagnose.measured.search_parameters import fitting_parameters
from transformer_parity.transformer.diagnose.measured.step import (
    decay_candidates,
    embedding_factor,
    float32_positions,
    position_angles,
    rate_candidates,
    wavelength_candidates,
)
from transformer_parity.transformer.stages.decode import TOKENS
from transformer_parity.transformer.stages.training_stage import LOSS

Arrays = Mapping[str, ndarray]
EXACT, LIKELY, UNKNOWN = "exact", "likely", "unknown"
VARIANTS = {bug.name for bug in STEP_VARIANTS}
EXACTLY, CHANGED = "behaves exactly like", "the reference with this change"
PLACED = 1000  # approximate maximum number of attempts to apply a bug to only some model parts
# Maps the end of a tap's name to a description of the value that the tap must record. In ports that are based on
# published code, taps often record a different value.
MEANINGS = {
    "_norm.output": "the output of the norm (with post-norm, of the normalized residual sum)",
    ".scores": "the scores after scaling and before the mask",
    ".weights": "the weights after softmax and before dropout",
    ".inner": "the hidden layer after the activation",
}


@dataclass(frozen=True)
class Diagnosis:
    """The best explanation of how a port differs from the reference.

    Attributes:
        sentence: The diagnosis as a sentence. If there are multiple statements, this is the one with the strongest
            evidence.
        confidence: ``exact`` if a candidate reproduces every value, ``likely`` if other evidence points to a cause, and
            ``unknown`` otherwise.
        candidates: Names of the candidates that reproduce every value or, if the confidence is ``likely``, every value
            in the cases whose results differ from the reference. There are multiple names if the cases can't
            distinguish between the candidates.
        error: Largest relative error between the port and the first candidate; infinite if there is no candidate.
        runner_up: Name of the candidate with the smallest error among the candidates that don't reproduce every value.
        next_error: Largest relative error of this candidate in the following tensors: all tensors up to and including
            the first one that the candidate doesn't reproduce, and the last tensor.
        signatures: Further statements about the difference, sorted by the strength of their evidence.
        config: Config fields that declare the convention of the port; empty if the difference is a bug.
    """

    sentence: str
    confidence: str
    candidates: tuple[str, ...] = ()
    error: float = math.inf
    runner_up: str = ""
    next_error: float = math.inf
    signatures: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    to_dict = asdict  # returns the fields as built-in Python types


def diagnose(
    case: Case,
    actual: Arrays,
    port: str,
    progress: Callable[[str], None] = lambda text: None,
    known: Sequence[Bug] | None = None,
    others: Sequence[tuple[Case, Arrays | None]] = (),
) -> Diagnosis:
    """Find the candidate that reproduces every tensor of a port.

    A port may record a different value for a tap than the tap's name implies. Therefore, if no candidate reproduces all
    activations, the function repeats the search and ignores all taps of the same type as the first tap that differs,
    for example all ``scores``. If this search also fails, the function compares only the output.

    Args:
        case: The case that the port ran.
        actual: The port's float64 tensors, in the order of computation (see ``outputs.tensors``).
        port: The port's name in messages.
        progress: Callback that receives a description of the next search step.
        known: The bugs and conventions to try, or None to try all known bugs and conventions.
        others: Other cases of the same model, which an exact candidate must also reproduce. Each case is paired with
            the port's tensors, or with None if the port agrees with the reference in this case.
    """
    known = candidates(case.config, case.stage) if known is None else known
    trials = Trials.of(case, actual, others)
    start = trials.run(TRUTH)
    if start is None or start.is_exact:
        return Diagnosis(f"every value that {port} returned here matches the reference", UNKNOWN)
    # A statement about the port's learning rates, if these rates explain all losses and weights of this training case.
    deviation = schedule_in_words(case, measured_rates(case, actual))
    rates = rate_candidates(case, actual)
    measured = [*rates, *optimizer_candidates(case, actual)]
    known = [*known, *decay_candidates(case, actual), *search_candidates(case, actual)]
    known += wavelength_candidates(case, actual)
    progress(f"{len(known) + len(measured)} candidate changes")
    places = tuple if deviation else partial(at_single_places, case, actual, known)
    if found := _apart_from_loss(trials, known, port, progress, places):
        return found
    if found := _named_in_search(trials, known, port, progress):
        return found
    exact, tried = _search(trials, start, [*known, *measured], progress, places, together=False)
    if not exact and not deviation and (number := measured_number(trials)):
        exact, deviation = [number], f"it uses {number.candidate.name}"
    # If the learning rate differs, skip combinations of bugs: they are slow, and they can't reveal the port's schedule.
    if not exact and not (rates or deviation):
        exact, several = _together(trials, start, tried, known, progress)
        tried += several
    confirmed = [attempt for attempt in exact if trials.holds_elsewhere(attempt.candidate)]
    if confirmed:
        return _exact(port, confirmed, tried)
    if deviation:
        return Diagnosis(f"in {case.name}, {port} trains exactly like the reference, except that {deviation}", EXACT)
    if not exact and case.stage == ACTIVATIONS and (found := _by_fewer_tensors(trials, start, known, port, progress)):
        return found
    if pairs := _and_another(trials, exact, known, progress):
        return _exact(port, pairs, tried)
    # By chance, a combination of bugs may match one case. If the port returned only tokens, a single bug may too.
    singles = [attempt for attempt in exact if len(attempt.candidate.parts) == 1 and trials.names != (TOKENS,)]
    sometimes = [one for one in singles if trials.differing_cases().holds_elsewhere(one.candidate)]
    if sometimes:
        name = sometimes[0].candidate.name
        sentence = f"some {case.stage} cases agree; in those that differ, {port} behaves like {CHANGED}: {name}"
        return Diagnosis(sentence, LIKELY, (name,), sometimes[0].worst)
    for positions_of in (float32_positions, embedding_factor, position_angles):
        if positions := positions_of(trials, trials.names[start.matched], port):
            return Diagnosis(positions, LIKELY)
    return _unknown([attempt for attempt in tried if attempt not in exact], start, case.stage == ACTIVATIONS)


def _apart_from_loss(
    trials: Trials,
    known: Sequence[Bug],
    port: str,
    progress: Callable[[str], None],
    places: Callable[[], Sequence[tuple[Bug, Place]]],
) -> Diagnosis | None:
    """Search for candidates that reproduce only the losses, or only the gradients.

    If only losses are wrong, the function ignores all other tensors. If only gradients are wrong, it ignores losses.

    Returns:
        The diagnosis. None unless only losses or only gradients are wrong, and a candidate reproduces them.
    """
    wrong, losses = set(trials.differing(TRUTH)), {name for name in trials.names if name.endswith(LOSS)}
    if losses and wrong <= losses:
        rest, note = trials.without(set(trials.names) - losses), "; only the loss differs, and its gradient is correct"
    elif losses and wrong.isdisjoint(losses) and trials.case.stage == GRADIENTS:
        rest, note = trials.without(losses), "; only the gradients differ, and the loss is correct"
    else:
        return None
    usual = rest.run(TRUTH)
    if usual is None:
        return None
    exact, tried = _search(rest, usual, known, progress, places, together=False)
    confirmed = [attempt for attempt in exact if rest.holds_elsewhere(attempt.candidate)]
    of_both = [one for one in confirmed if (found := trials.run(one.candidate)) and found.is_exact]
    if not confirmed:
        return None
    if of_both:
        return _exact(port, of_both, tried)
    return replace(_exact(port, confirmed, tried, note), config={})  # each convention affects the loss and its gradient


def _named_in_search(
    trials: Trials, known: Sequence[Bug], port: str, progress: Callable[[str], None]
) -> Diagnosis | None:
    """Find a bug or a search parameter that explains the results of all searches, or of all searches of one type.

    Returns:
        The diagnosis, or None if no bug or parameter explains the tokens, or if the case has no search.
    """
    if trials.case.search is None:
        return None
    kinds = [trials, *filter(None, [trials.for_same_kind_of_search()])]
    tried = [attempt for bug in known if (attempt := trials.run(Candidate((bug,))))]
    exact = [attempt for attempt in tried if attempt.is_exact]
    confirmed = [[one for one in exact if some.holds_elsewhere(one.candidate)] for some in kinds]
    alike = EXACTLY
    if not any(confirmed):
        progress("search parameters")
        confirmed, alike = list(fitting_parameters(trials, kinds)), "returns the same tokens as"
    for some, found in zip(kinds, confirmed, strict=True):
        if found and some is trials:
            return _exact(port, found, tried, alike=alike)
        if found:
            kind = "greedy" if trials.case.options.beam_size is None else "beam"
            diagnosis = _exact(port, found, tried, alike=alike)
            names = tuple(f"{name}, in {kind} search only" for name in diagnosis.candidates)
            sentence = f"in {kind} search, {diagnosis.sentence}"
            return replace(diagnosis, sentence=sentence, candidates=names, config={})
    return None


def reproducing_output(case: Case, actual: Arrays, known: Sequence[Bug]) -> list[Candidate]:
    """Return the candidates with one bug that reproduce the output of a case, even if they don't reproduce its taps."""
    trials = Trials(case, actual, (), (OUTPUT,))
    attempts = [trials.run(Candidate((bug,))) for bug in known]
    return [attempt.candidate for attempt in attempts if attempt and attempt.is_exact]


def _search(
    trials: Trials,
    start: Attempt,
    known: Sequence[Bug],
    progress: Callable[[str], None],
    places: Callable[[], Sequence[tuple[Bug, Place]]] = tuple,
    *,
    together: bool = True,
) -> tuple[list[Attempt], list[Attempt]]:
    """Return the attempts that reproduce every tensor, and the list of all attempts.

    The search tries each bug in the full model, then each bug in only some model parts, then combinations of bugs.
    """
    singles = [attempt for bug in known if (attempt := trials.run(Candidate((bug,))))]
    exact, tried = [attempt for attempt in singles if attempt.is_exact], list(singles)
    if not exact:
        progress("bugs in single places")
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
    known: Sequence[Bug],
    progress: Callable[[str], None],
) -> tuple[list[Attempt], list[Attempt]]:
    """Return the attempts that combine multiple bugs and reproduce every tensor, and the list of all attempts.

    Variants of an optimizer step are excluded, because there are too many of them to try all pairs.
    """
    pairs = [bug for bug in known if bug.name not in VARIANTS]
    singles = [one for one in tried if one.candidate.place is None and one.candidate.parts[0] in pairs]
    several: list[Attempt] = []
    for attempts in combinations(trials, start, singles, pairs, progress):
        several += attempts
        if exact := simplest([attempt for attempt in attempts if attempt.is_exact]):
            return exact, several
    return [], several


def _first_exact(trials: Trials, places: Sequence[tuple[Bug, Place]]) -> tuple[list[Attempt], list[Attempt]]:
    """Try bugs in only some model parts. Return the attempts that reproduce every tensor, and all attempts.

    A place is a set of model parts in which to try a bug. The function tries the largest sets first. If a bug in one of
    these sets reproduces every tensor, the function doesn't try smaller sets.
    """
    tried: list[Attempt] = []
    for _, same_size in itertools.groupby(places, lambda one: len(one[1].parts)):
        attempts = [found for bug, place in same_size if (found := trials.run(Candidate((bug,), place)))]
        tried += attempts
        if exact := [attempt for attempt in attempts if attempt.is_exact]:
            return exact, tried
        if len(tried) > PLACED:
            break
    return [], tried


def _and_another(
    trials: Trials, exact: Sequence[Attempt], known: Sequence[Bug], progress: Callable[[str], None]
) -> list[Attempt]:
    """Add a second bug to candidates that reproduce only this case, and return the pairs that reproduce all cases."""
    failing = [(case, shown) for case, shown in trials.others if shown is not None]
    for attempt in exact[:PROMISING]:
        if len(attempt.candidate.parts) > 1:  # combinations may reproduce a single case by chance
            continue
        runs = ((one, Trials.of(*one).run(attempt.candidate)) for one in failing)
        there = next((one for one, run in runs if run is None or not run.is_exact), None)
        if there is None:
            continue
        progress(f"{attempt.candidate.name} and a second change")
        elsewhere = Trials.of(*there)
        both = [
            Candidate((*attempt.candidate.parts, one))
            for one in known
            if one.name not in VARIANTS and not clash(attempt.candidate.parts, one)
        ]
        both = [one for one in both if (seen := elsewhere.run(one)) is not None and seen.is_exact]
        fits = [found for one in both if (found := trials.run(one)) and found.is_exact and trials.holds_elsewhere(one)]
        if fits:
            return fits
    return []


def _by_fewer_tensors(
    trials: Trials, start: Attempt, known: Sequence[Bug], port: str, progress: Callable[[str], None]
) -> Diagnosis | None:
    """Search for candidates that reproduce all tensors except one type of tap, or that reproduce only the output.

    The first search ignores all taps of the same type as the first tap that differs. The second search compares only
    the output, and tries only candidates with one bug.

    Returns:
        The diagnosis, or None if neither search finds a candidate. If only taps differ, the diagnosis lists these taps.
    """
    first = trials.names[start.matched]
    kind = next((ending for ending in MEANINGS if first.endswith(ending)), "")
    if OUTPUT not in (differing := trials.differing(TRUTH)) and trials.without(differing).holds_elsewhere(TRUTH):
        meaning = f", where the reference records {MEANINGS[kind]}" if kind else ""
        return Diagnosis(f"the output is correct; the port differs only in {_counted(differing)}{meaning}", LIKELY)
    alike = [name for name in trials.names if kind and name.endswith(kind)]
    for left_out in (alike, [name for name in trials.names if name != OUTPUT]):
        rest = trials.without(left_out)
        usual = rest.run(TRUTH)
        if not left_out or usual is None or usual.is_exact:
            continue
        exact, tried = _search(rest, usual, known, progress, together=left_out is alike)
        confirmed = [attempt for attempt in exact if rest.holds_elsewhere(attempt.candidate)]
        if confirmed:
            note = (
                f"; this ignores {_counted(left_out)}, because taps may record different values than their names imply"
            )
            return _exact(port, confirmed, tried, note)
    return None


def _counted(names: Sequence[str]) -> str:
    return f"tap {names[0]}" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more taps"


def _exact(
    port: str, exact: Sequence[Attempt], tried: Sequence[Attempt], note: str = "", alike: str = EXACTLY
) -> Diagnosis:
    """Return a diagnosis with the candidates that reproduce every value, and the error of the next best candidate.

    A port can declare conventions. Therefore, if a candidate contains only conventions, omit bugs in individual parts.
    """
    runner_up = _best([attempt for attempt in tried if not attempt.is_exact])
    if any(all(map(is_convention, attempt.candidate.parts)) for attempt in exact):
        exact = [one for one in exact if one.candidate.place is None or all(map(is_convention, one.candidate.parts))]
    names = tuple(dict.fromkeys(attempt.candidate.name for attempt in exact))
    error = exact[0].worst
    also = f", or equivalently in these cases: {' or '.join(names[1:])}" if names[1:] else ""
    sentence = f"{port} {alike} {CHANGED}: {names[0]}{also} (error {error:.0e}"
    config = _convention(exact[0].candidate)
    if runner_up is None:
        return Diagnosis(f"{sentence}){note}", EXACT, names, error, config=config)
    name, left = runner_up.candidate.name, runner_up.worst
    return Diagnosis(f"{sentence}, next best {left:.0e}){note}", EXACT, names, error, name, left, config=config)


def _convention(candidate: Candidate) -> dict[str, Any]:
    """Return the config fields that declare a candidate's conventions, or {} if the candidate contains a bug."""
    if candidate.place is not None or not all(map(is_convention, candidate.parts)):
        return {}
    return {name: value for part in candidate.parts for name, value in part.config.items()}


def _unknown(tried: Sequence[Attempt], start: Attempt, in_order: bool) -> Diagnosis:
    """Return a diagnosis for a port whose values no candidate reproduces.

    If the tensors are in the order of computation, the diagnosis mentions the candidate that matches the most tensors.
    """
    runner_up = _best(tried)
    name, left = (runner_up.candidate.name, runner_up.worst) if runner_up else ("", math.inf)
    sentence = "unknown: no known bug or convention, and no combination of them, reproduces these numbers"
    further = max(tried, key=lambda attempt: attempt.matched, default=None)
    if in_order and further is not None and further.matched > start.matched:
        more = further.matched - start.matched
        right = "one more tensor is correct" if more == 1 else f"{more} more tensors are correct"
        sentence += f". With {further.candidate.name}, {right}"
    return Diagnosis(sentence, UNKNOWN, (), math.inf, name, left)


def _best(attempts: Sequence[Attempt]) -> Attempt | None:
    return min(attempts, key=lambda attempt: attempt.worst, default=None)
