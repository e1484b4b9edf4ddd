"""Diagnosis: from a port's numbers to a sentence about what it does.

Two engines. The first tries hypotheses: the reference is run under each known mistake and each published convention,
and under several at once where each makes more of the port's numbers right; one that reproduces all of them is what the
port does. The second reads the signature of the error (see ``signatures``), and only says what it looks like. Where
neither finds anything, the answer is "unknown".
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.config import TransformerConfig
from transformer_parity.cases.case import ACTIVATIONS, DECODE, GRADIENTS, STEPS, Case
from transformer_parity.compare import training_outputs
from transformer_parity.compare.outputs import tensors
from transformer_parity.diagnose.blame import distance
from transformer_parity.diagnose.hypotheses import Hypothesis, hypotheses, is_convention
from transformer_parity.mistakes.mistake import Mistake

Arrays = Mapping[str, ndarray]
EXACT, LIKELY, UNKNOWN = "exact", "likely", "unknown"
# What a hypothesis that is right may leave: rounding. The weakest mistake leaves 1.8e-10 in activations (an epsilon
# rounded to float32) and 8e-9 in weights (1e-6 added to a norm before clipping).
REPRODUCES = {ACTIVATIONS: 1e-12, DECODE: 1e-12, GRADIENTS: 1e-10, STEPS: 1e-10}
DEPTH = 3  # mistakes at once
PROMISING = 6  # hypotheses that are tried together with every other
OBSERVATIONS = 400  # of hypotheses, kept in memory: some hundred kilobytes each
BEAM = 4  # sets of hypotheses that are changed further, where no tap shows the way
ATTEMPTS = 1000  # at that; a second for a hundred


@dataclass(frozen=True)
class Diagnosis:
    """What a port does, as far as its numbers say.

    Attributes:
        sentence: In words.
        confidence: ``exact`` where a hypothesis reproduces every number, ``likely`` where the error has a signature, or
            ``unknown``.
        hypotheses: Those that reproduce every number; several where no number here tells them apart.
        error: The largest relative error that the first of them leaves; infinite if there is none.
        runner_up: The next best.
        next_error: What it leaves, at the first tensor that it does not reproduce or in the last.
        signatures: What the error looks like.
    """

    sentence: str
    confidence: str
    hypotheses: tuple[str, ...] = ()
    error: float = math.inf
    runner_up: str = ""
    next_error: float = math.inf
    signatures: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Attempt:
    """What became of one hypothesis.

    Attributes:
        hypothesis: What was tried.
        matched: How many tensors are right before the first that is not.
        of: How many there are.
        worst: The largest relative error: of all where all are right, or else of the first wrong one and the last.
    """

    hypothesis: Hypothesis
    matched: int
    of: int
    worst: float

    @property
    def is_exact(self) -> bool:
        return self.matched == self.of


def diagnose(
    case: Case,
    actual: Arrays,
    port: str,
    progress: Callable[[str], None] = lambda text: None,
    known: Sequence[Mistake] | None = None,
    others: Sequence[tuple[Case, Arrays | None]] = (),
) -> Diagnosis:
    """Look for the hypothesis that reproduces every tensor of a port.

    Args:
        case: What was run.
        actual: What the port showed in float64, in the order of computation (see ``tensors``).
        port: What to call it.
        progress: Told what is tried.
        known: The mistakes and conventions to try; None is all that are known.
        others: Cases of the same model that an exact hypothesis has to reproduce too, with what the port showed there;
            None where it agrees with the reference.
    """
    known = hypotheses(case.config, case.stage) if known is None else known
    trials = _Trials(case, actual, REPRODUCES[case.stage])
    start = trials.run(Hypothesis(()))
    if start is None or start.is_exact:
        return Diagnosis(f"{port} does as the reference does here", UNKNOWN)
    progress(f"{len(known)} hypotheses")
    singles = [attempt for mistake in known if (attempt := trials.run(Hypothesis((mistake,))))]
    exact = [attempt for attempt in singles if attempt.is_exact]
    tried = list(singles)
    if not exact:
        for attempts in _together(trials, start, singles, known, progress):
            tried += attempts
            if exact := _simplest([attempt for attempt in attempts if attempt.is_exact]):
                break
    if not exact or any(_is_confirmed(attempt, others) for attempt in exact):
        return _sentence(port, [attempt for attempt in exact if _is_confirmed(attempt, others)], tried, start)
    name = exact[0].hypothesis.name
    return Diagnosis(f"in {case.name}, but not in every case, {port} behaves like the reference with {name}", LIKELY)


def _is_confirmed(attempt: _Attempt, others: Sequence[tuple[Case, Arrays | None]]) -> bool:
    """Whether a hypothesis does in other cases what the port does there."""
    for case, shown in others:
        found, usual = _observed(attempt.hypothesis, case), _observed(Hypothesis(()), case)
        actual = usual if shown is None else shown
        if found is None or actual is None:
            return False
        names = [name for name in actual if name != training_outputs.WHOLE]
        if not all(distance(name, actual, found) <= REPRODUCES[case.stage] for name in names):
            return False
    return True


class _Trials:
    """Runs a case under hypotheses, and compares with what a port has shown."""

    def __init__(self, case: Case, actual: Arrays, tolerance: float) -> None:
        self.case = case
        self.actual = actual
        self.tolerance = tolerance

    def run(self, hypothesis: Hypothesis) -> _Attempt | None:
        """Return how well a hypothesis does; None where it cannot be, or describes no model."""
        found = _observed(hypothesis, self.case)
        if found is None:
            return None
        names = [name for name in self.actual if name != training_outputs.WHOLE]
        worst = 0.0
        for matched, name in enumerate(names):
            worst = max(worst, error := distance(name, self.actual, found))
            if not error <= self.tolerance:
                worst = max(worst, distance(names[-1], self.actual, found))
                return _Attempt(hypothesis, matched, len(names), worst)
        return _Attempt(hypothesis, len(names), len(names), worst)


def _observed(hypothesis: Hypothesis, case: Case) -> Arrays | None:
    """Return what the reference computes under a hypothesis; None where it cannot be, or describes no model.

    Kept for the next port that fails in the same case.
    """
    model = (repr(case.config), case.seed, case.weights_file)
    key = (case.name, model, repr(case.settings), repr(case.search), training_outputs.SNAPSHOTS, hypothesis.content)
    if key not in _OBSERVED:
        if len(_OBSERVED) >= OBSERVATIONS:
            _OBSERVED.popitem(last=False)
        try:
            with np.errstate(all="ignore"):
                _OBSERVED[key] = tensors(hypothesis.load(case.config, case.load_weights()), case)
        except Exception:  # the mistake does not go with this model
            _OBSERVED[key] = None
    _OBSERVED.move_to_end(key)
    return _OBSERVED[key]


_OBSERVED: OrderedDict[Any, Arrays | None] = OrderedDict()


def _together(
    trials: _Trials,
    start: _Attempt,
    singles: Sequence[_Attempt],
    known: Sequence[Mistake],
    progress: Callable[[str], None],
) -> Iterator[list[_Attempt]]:
    """Yield what becomes of several hypotheses at once, each of which makes more tensors right than those before."""
    frontier = _promising(singles, start.matched)
    if not frontier and start.of <= 2:  # ports of others differ in conventions: they are looked at first
        for some in ([mistake for mistake in known if is_convention(mistake)], known):
            yield from _closer(trials, singles, some, known, progress)
        return
    for _ in range(DEPTH - 1):
        grown: list[_Attempt] = []
        for attempt in frontier:
            progress(f"{attempt.hypothesis.name} and another")
            attempts = [
                found
                for mistake in known
                if not _clash(attempt.hypothesis.parts, mistake)
                and (found := trials.run(Hypothesis((*attempt.hypothesis.parts, mistake))))
            ]
            grown += [found for found in attempts if found.matched > attempt.matched]
            if any(found.is_exact for found in attempts):
                break
        yield grown
        frontier = _promising(grown, start.matched + 1)


def _closer(
    trials: _Trials,
    singles: Sequence[_Attempt],
    some: Sequence[Mistake],
    known: Sequence[Mistake],
    progress: Callable[[str], None],
) -> Iterator[list[_Attempt]]:
    """Yield what becomes of several hypotheses at once where no tap shows the way: of the closest, every change.

    Whatever else is wrong, a hypothesis that is right mostly leaves a smaller error than one that is not. A change is
    one mistake more, or another convention, the config's own among them.
    """
    own = [Mistake("", "", config={name: getattr(trials.case.config, name)}) for name in _fields(known)]
    seen = {_parts_of(attempt) for attempt in singles}
    beam, left = sorted(singles, key=lambda attempt: attempt.worst)[:BEAM], ATTEMPTS
    best = math.inf
    while beam and beam[0].worst < best and left > 0:
        best = beam[0].worst
        grown: list[_Attempt] = []
        for attempt in beam:
            progress(f"{attempt.hypothesis.name} and another")
            for mistake in (*some, *own):
                parts = _changed(attempt.hypothesis.parts, mistake, known, trials.case.config)
                if not parts or frozenset(part.name for part in parts) in seen or left <= 0:
                    continue
                seen.add(frozenset(part.name for part in parts))
                left -= 1
                if found := trials.run(Hypothesis(parts)):
                    grown.append(found)
            if exact := [found for found in grown if found.is_exact]:
                grown += _without_idle(trials, _simplest(exact)[0])
                break
        yield grown
        beam = sorted(grown, key=lambda attempt: attempt.worst)[:BEAM]


def _without_idle(trials: _Trials, attempt: _Attempt) -> list[_Attempt]:
    """Return an exact attempt without the parts that change nothing."""
    for part in attempt.hypothesis.parts:
        fewer = Hypothesis(tuple(other for other in attempt.hypothesis.parts if other is not part))
        if (found := trials.run(fewer)) and found.is_exact:
            return [found, *_without_idle(trials, found)]
    return []


def _parts_of(attempt: _Attempt) -> frozenset[str]:
    return frozenset(part.name for part in attempt.hypothesis.parts)


def _fields(known: Sequence[Mistake]) -> list[str]:
    return sorted({name for mistake in known if is_convention(mistake) for name in mistake.config})


def _changed(
    parts: Sequence[Mistake], mistake: Mistake, known: Sequence[Mistake], config: TransformerConfig
) -> tuple[Mistake, ...]:
    """Return some hypotheses with one more; what it says about a convention holds, whatever they have said before."""
    others = [part for part in parts if not is_convention(part)]
    fields: dict[str, Any] = {}
    for part in (*parts, mistake):
        if is_convention(part):
            fields |= part.config
    if not is_convention(mistake):
        others.append(mistake)
    fields = {name: value for name, value in fields.items() if value != getattr(config, name)}
    named = []
    for one in sorted(filter(is_convention, known), key=lambda one: -len(one.config)):  # presets first
        if one.config.items() <= fields.items():
            named.append(one)
            fields = {name: value for name, value in fields.items() if name not in one.config}
    return (*others, *named)


def _promising(attempts: Sequence[_Attempt], matched: int) -> list[_Attempt]:
    """Return the attempts that make more tensors right than that, the best first, one for each result."""
    best: dict[tuple[int, float], _Attempt] = {}
    for attempt in sorted(attempts, key=lambda attempt: (-attempt.matched, len(attempt.hypothesis.parts))):
        if attempt.matched > matched:
            best.setdefault((attempt.matched, attempt.worst), attempt)
    return list(best.values())[:PROMISING]


def _clash(parts: Sequence[Mistake], other: Mistake) -> bool:
    """Whether two say something about the same field, or are the same."""
    return any(part is other or part.config.keys() & other.config.keys() for part in parts)


def _simplest(exact: Sequence[_Attempt]) -> list[_Attempt]:
    """Return those with the fewest parts, each set of parts once."""
    fewest = min((len(attempt.hypothesis.parts) for attempt in exact), default=0)
    found: dict[frozenset[str], _Attempt] = {}
    for attempt in exact:
        if len(attempt.hypothesis.parts) == fewest:
            found.setdefault(frozenset(part.name for part in attempt.hypothesis.parts), attempt)
    return list(found.values())


def _sentence(port: str, exact: Sequence[_Attempt], tried: Sequence[_Attempt], start: _Attempt) -> Diagnosis:
    others = [attempt for attempt in tried if not attempt.is_exact]
    runner_up = min(others, key=lambda attempt: attempt.worst, default=None)
    next_name, next_error = (runner_up.hypothesis.name, runner_up.worst) if runner_up else ("", math.inf)
    if exact:
        names = tuple(attempt.hypothesis.name for attempt in exact)
        error = exact[0].worst
        also = f", or {' or '.join(names[1:])}, which are the same here" if names[1:] else ""
        sentence = f"{port} behaves exactly like the reference with {names[0]}{also} (error {error:.0e}"
        sentence += f", next best {next_error:.0e}: {next_name})" if runner_up else ")"
        return Diagnosis(sentence, EXACT, names, error, next_name, next_error)
    sentence = "unknown: no known mistake or convention, nor several of them together, reproduces these numbers"
    further = max(others, key=lambda attempt: attempt.matched, default=None)
    if further is not None and further.matched > start.matched:
        sentence += f". With {further.hypothesis.name}, {further.matched - start.matched} more tensors are right"
    return Diagnosis(sentence, UNKNOWN, (), math.inf, next_name, next_error)
