"""Search for combinations of bugs that reproduce a port's values if no individual bug does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate, is_convention
from transformer_parity.transformer.diagnose.candidates.trials import Attempt, Trials
from transformer_spec.config import TransformerConfig

DEPTH = 3  # maximum number of bugs in a combination
PROMISING = 6  # maximum number of candidates that are combined with further bugs
BEAM = 4  # number of combinations that are extended in each round, for cases without taps
ATTEMPTS = 1000  # maximum number of combinations to try in cases without taps; 100 of them take about a second


def combinations(
    trials: Trials,
    start: Attempt,
    singles: Sequence[Attempt],
    known: Sequence[Bug],
    progress: Callable[[str], None],
) -> Iterator[list[Attempt]]:
    """Yield attempts with two bugs, then with three bugs.

    The function yields and extends a combination only if its last bug increased the number of matching tensors. For
    cases without taps, see ``_closer``.
    """
    frontier = _promising(singles, start.matched)
    if not frontier and start.of <= 2:  # published ports mostly differ in conventions, so try conventions first
        for some in ([bug for bug in known if is_convention(bug)], known):
            yield from _closer(trials, singles, some, known, progress)
        return
    for _ in range(DEPTH - 1):
        grown: list[Attempt] = []
        for attempt in frontier:
            progress(f"{attempt.candidate.name} and a second change")
            attempts = [
                found
                for bug in known
                if not clash(attempt.candidate.parts, bug)
                and (found := trials.run(Candidate((*attempt.candidate.parts, bug))))
            ]
            grown += [found for found in attempts if found.matched > attempt.matched]
            if any(found.is_exact for found in attempts):
                break
        yield grown
        frontier = _promising(grown, start.matched + 1)


def _closer(
    trials: Trials,
    singles: Sequence[Attempt],
    some: Sequence[Bug],
    known: Sequence[Bug],
    progress: Callable[[str], None],
) -> Iterator[list[Attempt]]:
    """For cases without taps, yield attempts with modified copies of the candidates that have the smallest errors.

    If the port has two bugs, a candidate with one of them usually has a smaller error than a candidate with neither.
    Each modification adds one bug, sets one convention, or resets one config field to its value in the config of the
    case.
    """
    fields = sorted({name for bug in known if is_convention(bug) for name in bug.config})
    own = [Bug("", "", config={name: getattr(trials.case.config, name)}) for name in fields]
    seen = {_names(attempt.candidate.parts) for attempt in singles}
    beam, left = sorted(singles, key=lambda attempt: attempt.worst)[:BEAM], ATTEMPTS
    best = math.inf
    while beam and beam[0].worst < best and left > 0:
        best = beam[0].worst
        grown: list[Attempt] = []
        for attempt in beam:
            progress(f"{attempt.candidate.name} and a second change")
            for bug in (*some, *own):
                parts = _changed(attempt.candidate.parts, bug, known, trials.case.config)
                if not parts or _names(parts) in seen or left <= 0:
                    continue
                seen.add(_names(parts))
                left -= 1
                if found := trials.run(Candidate(parts)):
                    grown.append(found)
            if exact := [found for found in grown if found.is_exact]:
                grown += _without_idle(trials, simplest(exact)[0])
                break
        yield grown
        beam = sorted(grown, key=lambda attempt: attempt.worst)[:BEAM]


def _without_idle(trials: Trials, attempt: Attempt) -> list[Attempt]:
    """Remove unnecessary bugs and conventions from a candidate that reproduces every tensor.

    The function removes one bug or convention at a time. It returns an attempt for each smaller candidate that still
    reproduces every tensor.
    """
    for part in attempt.candidate.parts:
        fewer = Candidate(tuple(other for other in attempt.candidate.parts if other is not part))
        if (found := trials.run(fewer)) and found.is_exact:
            return [found, *_without_idle(trials, found)]
    return []


def _names(parts: Sequence[Bug]) -> frozenset[str]:
    return frozenset(part.name for part in parts)


def _changed(parts: Sequence[Bug], bug: Bug, known: Sequence[Bug], config: TransformerConfig) -> tuple[Bug, ...]:
    """Add ``bug``, which may be a bug or a convention, to the bugs and conventions in ``parts``.

    If ``bug`` and a convention in ``parts`` set the same config field, the value from ``bug`` replaces the other value.
    """
    others = [part for part in parts if not is_convention(part)]
    fields: dict[str, Any] = {}
    for part in (*parts, bug):
        if is_convention(part):
            fields |= part.config
    if not is_convention(bug):
        others.append(bug)
    fields = {name: value for name, value in fields.items() if value != getattr(config, name)}
    named = []
    for one in sorted(
        filter(is_convention, known), key=lambda one: -len(one.config)
    ):  # presets set the most fields, so they are tried first
        if one.config.items() <= fields.items():
            named.append(one)
            fields = {name: value for name, value in fields.items() if name not in one.config}
    return (*others, *named)


def _promising(attempts: Sequence[Attempt], matched: int) -> list[Attempt]:
    """Return the best attempts among those that match more than ``matched`` tensors.

    If multiple attempts have the same number of matching tensors and the same error, only one of them is included.
    """
    best: dict[tuple[int, float], Attempt] = {}
    for attempt in sorted(attempts, key=lambda attempt: (-attempt.matched, len(attempt.candidate.parts))):
        if attempt.matched > matched:
            best.setdefault((attempt.matched, attempt.worst), attempt)
    return list(best.values())[:PROMISING]


def clash(parts: Sequence[Bug], other: Bug) -> bool:
    """Return whether ``parts`` includes ``other`` or sets a config field that ``other`` also sets."""
    return any(part is other or part.config.keys() & other.config.keys() for part in parts)


def simplest(exact: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts that combine the fewest bugs and conventions.

    If multiple attempts combine the same bugs and conventions, the result includes only the first of these attempts.
    """
    fewest = min((len(attempt.candidate.parts) for attempt in exact), default=0)
    found: dict[frozenset[str], Attempt] = {}
    for attempt in exact:
        if len(attempt.candidate.parts) == fewest:
            found.setdefault(_names(attempt.candidate.parts), attempt)
    return list(found.values())
