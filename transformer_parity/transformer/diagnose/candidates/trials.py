"""Trials: run the reference with a candidate's changes, and compare the results with a port's tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate
from transformer_parity.transformer.diagnose.evidence.blame import distance
from transformer_parity.transformer.stages.padding import Read
from transformer_parity.transformer.stages.registry import STAGES
from transformer_parity.transformer.stages.steps import SNAPSHOTS
from transformer_parity.transformer.stages.training_stage import WHOLE

Arrays = Mapping[str, ndarray]
MAX_CACHE_BYTES = 512 * 2**20  # maximum size of the cache; all candidates for one case need at most 140 MiB
# Numbers of steps in shortened training runs. The second loss depends on the first update, and the third loss depends
# on the moments.
BEGINNINGS = (1, 3)
TRUTH = Candidate(())


@dataclass(frozen=True)
class Attempt:
    """The result of trying one candidate.

    Attributes:
        candidate: The candidate that was tried.
        matched: Number of tensors that match before the first mismatch.
        of: Number of tensors to compare.
        worst: Largest relative error of the following tensors: all tensors up to and including the first mismatch, and
            the last tensor.
    """

    candidate: Candidate
    matched: int
    of: int
    worst: float

    @property
    def is_exact(self) -> bool:
        """Whether the candidate reproduces every tensor."""
        return self.matched == self.of


@dataclass(frozen=True)
class Trials:
    """The float64 tensors of a port, which candidates must reproduce.

    Attributes:
        case: The case that the port ran.
        actual: The port's tensors, in the order of computation.
        others: Other cases of the same model. Each case is paired with the port's tensors, or with None if the port
            agrees with the reference in this case.
        names: Names of the tensors to compare, in ``case`` and in ``others``.
    """

    case: Case
    actual: Arrays
    others: Sequence[tuple[Case, Arrays | None]]
    names: tuple[str, ...]

    @classmethod
    def of(cls, case: Case, actual: Arrays, others: Sequence[tuple[Case, Arrays | None]] = ()) -> Trials:
        """Return trials that compare all tensors of the port, except the concatenation of all gradients."""
        return cls(case, _read(case, actual), others, tuple(name for name in actual if name != WHOLE))

    def without(self, names: Collection[str]) -> Trials:
        """Return trials that ignore the given tensors."""
        return replace(self, names=tuple(name for name in self.names if name not in names))

    def run(self, candidate: Candidate) -> Attempt | None:
        """Compare the results of a candidate with the port's tensors, or return None if the candidate can't be run."""
        names = self.names
        for case in (*_beginnings(self.case), self.case):
            found = observed(candidate, case)
            if found is None:
                return None
            compared = names if case is self.case else [name for name in names if name in found]
            attempt = self._compared(candidate, found, compared)
            if not attempt.is_exact:
                # A run with fewer steps than ``self.case`` doesn't call other methods between training steps. The
                # results of these methods don't have to be compared, because they depend only on the weights, and the
                # weights are compared.
                missing = next((number for number, name in enumerate(names) if name not in compared), len(names))
                return replace(attempt, matched=min(missing, names.index(compared[attempt.matched])), of=len(names))
        return attempt

    def _compared(self, candidate: Candidate, found: Arrays, names: Sequence[str]) -> Attempt:
        """Compare the named tensors of the port with ``found``, the tensors of a candidate."""
        tolerance, worst = STAGES[self.case.stage].reproduces, 0.0
        for matched, name in enumerate(names):
            worst = max(worst, error := distance(name, self.actual, found))
            if not error <= tolerance:
                worst = max(worst, distance(names[-1], self.actual, found))
                return Attempt(candidate, matched, len(names), worst)
        return Attempt(candidate, len(names), len(names), worst)

    def differing(self, candidate: Candidate) -> list[str]:
        """Return the names of the tensors that a candidate doesn't reproduce; all names if it can't be run."""
        found = observed(candidate, self.case) or {}
        return [
            name for name in self.names if not distance(name, self.actual, found) <= STAGES[self.case.stage].reproduces
        ]

    def holds_elsewhere(self, candidate: Candidate) -> bool:
        """Return whether a candidate also reproduces the port's tensors in the other cases."""
        for case, shown in self.others:
            found, usual = observed(candidate, case), observed(TRUTH, case)
            if found is None and shown is None:  # for example, a clipping bug in a case without a clip norm
                continue
            actual = usual if shown is None else _read(case, shown)
            if found is None or actual is None:
                return False
            names = [name for name in self.names if name in actual]
            if not all(distance(name, actual, found) <= STAGES[case.stage].reproduces for name in names):
                return False
        return True

    def differing_cases(self) -> Trials:
        """Return trials whose ``others`` contains only the cases in which the port differs from the reference."""
        return replace(self, others=[(case, shown) for case, shown in self.others if shown is not None])

    def for_same_kind_of_search(self) -> Trials | None:
        """Return trials whose ``others`` contains only cases with the same type of search (greedy or beam search).

        Return None if the port fails with both types.
        """

        def is_beam(case: Case) -> bool:
            return case.options.beam_size is not None

        alike = [(case, shown) for case, shown in self.others if is_beam(case) == is_beam(self.case)]
        failing = [case for case, shown in self.others if shown is not None]
        return replace(self, others=alike) if all(is_beam(case) == is_beam(self.case) for case in failing) else None


def _beginnings(case: Case) -> Iterator[Case]:
    """Yield variants of a training case with fewer steps, which are faster and rule out most candidates."""
    last = (case.snapshots or SNAPSHOTS)[-1]
    for steps in BEGINNINGS if STAGES[case.stage].trains else ():
        if steps < last and not case.rewind:
            yield replace(case, snapshots=BEGINNINGS[: BEGINNINGS.index(steps) + 1], calls=())


def observed(candidate: Candidate, case: Case) -> Arrays | None:
    """Run the reference with a candidate's changes, and return its tensors, or None if the candidate can't be run.

    The result is cached, because the next port may fail on the same case.
    """
    task = (case.name, case.compares_padding, repr(case.model), repr(case.settings), repr(case.search), case.snapshots)
    key = (*task, candidate.content)
    if key not in _OBSERVED:
        _OBSERVED.add(key, _run(candidate, case))
    _OBSERVED.move_to_end(key)
    return _OBSERVED[key]


def _run(candidate: Candidate, case: Case) -> Arrays | None:
    try:
        with np.errstate(all="ignore"):
            found = tensors(candidate.load(case.config, case.load_weights()), case)
        return _read(case, found) if candidate.parts else found
    except Exception:  # the reference can't run this case with these changes
        return None


def _read(case: Case, arrays: Arrays) -> Arrays:
    """Return the tensors, with the reference's values at positions that don't affect the result, such as padding."""
    usual = observed(TRUTH, case)
    return arrays if usual is None else Read.of(case, usual).combine(arrays, usual)


class _Cache(OrderedDict[Any, Arrays | None]):
    """The most recently used results, up to a total size of ``MAX_CACHE_BYTES``."""

    size = 0

    def add(self, key: Any, found: Arrays | None) -> None:
        self[key] = found
        self.size += _bytes(found)
        while self.size > MAX_CACHE_BYTES and len(self) > 1:
            self.size -= _bytes(self.popitem(last=False)[1])


def _bytes(found: Arrays | None) -> int:
    return sum(array.nbytes for array in (found or {}).values())


_OBSERVED = _Cache()
