"""Localization: at which tensor a difference starts, and which tensors only inherit it.

Behind the first mistake all numbers are wrong, so that a comparison with the reference's says nothing about any block
but the first. A block is therefore run again from right inputs, or the reference is run from the port's:

- A port whose taps go on with what they are given runs once more, with the reference's value behind every tap: each
  tap then shows what the port computes from right inputs only.
- Where a port only shows its taps, or there are only files, the reference runs with the port's value behind every tap:
  where it computes what the port did, the port's block is right, and its input was not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.engine.tensors import Tensors, relative_error

INTRODUCED, INHERITED, FINE = "introduced", "inherited", "fine"
PORT, REFERENCE, NOTHING = "port", "reference", "nothing"  # what was run again
Rerun = Callable[
    [Arrays], Tensors
]  # takes values for some taps, and returns all tensors of a run that continues with them


@dataclass(frozen=True)
class Mark:
    """The errors of one tensor.

    Attributes:
        name: A tap; backwards, the gradient ``at`` a tap or ``of`` a parameter.
        free: The error in the port's own run.
        alone: The error that this block makes by itself, from right inputs; infinite where that cannot be told.
        tolerance: The largest error allowed.
        verdict: Introduced here, inherited from an earlier tensor, or fine.
    """

    name: str
    free: float
    alone: float
    tolerance: float
    verdict: str


@dataclass(frozen=True)
class Blame:
    """Where the differences of one case start.

    Attributes:
        backend: The port.
        dtype: The working dtype.
        case: The name of the case.
        stage: The stage of the case.
        replayed: What was run again: ``port``, ``reference``, or ``nothing`` where no tap is shown.
        marks: In the order of computation.
    """

    backend: str
    dtype: str
    case: str
    stage: str
    replayed: str = NOTHING
    marks: tuple[Mark, ...] = ()

    @property
    def introduced(self) -> list[str]:
        """The places where a difference was introduced, in the order of computation."""
        return [mark.name for mark in self.marks if mark.verdict == INTRODUCED]

    to_dict = asdict  # the fields as plain values


@dataclass(frozen=True)
class Evidence:
    """The tensors that a blame is computed from.

    Attributes:
        actual: Of the port's own run.
        expected: Of the reference's own run.
        alone: At each place, the port's tensor from given inputs; from its own where only the reference is replayed.
        wanted: What it should be there.
    """

    blame: Blame
    actual: Arrays
    expected: Arrays
    alone: Arrays
    wanted: Arrays


def distance(name: str, actual: Arrays, expected: Arrays) -> float:
    """Return how far apart two tensors are; infinite where their shapes, or their NaNs, are not the same."""
    return apart(name, actual, expected, lambda name, mine, theirs: relative_error(mine[name], theirs[name]))


def apart(name: str, actual: Arrays, expected: Arrays, error: Callable[[str, Arrays, Arrays], float]) -> float:
    """Return the error of a tensor; infinite where the shapes, or the NaNs, are not the same.

    Args:
        name: The name of the tensor.
        actual: The tensors of one side.
        expected: The tensors of the other side.
        error: Returns how far apart two finite tensors of one shape are.
    """
    if name not in actual or name not in expected or actual[name].shape != expected[name].shape:
        return math.inf
    mine, theirs = (np.asarray(array[name], np.float64) for array in (actual, expected))
    finite = np.isfinite(theirs)
    if not np.array_equal(np.isfinite(mine), finite):
        return math.inf
    if not finite.all():
        return relative_error(mine[finite], theirs[finite])
    return error(name, actual, expected)


@dataclass(frozen=True)
class Replay:
    """Two implementations, each of which can be run again on the same input from given intermediate values.

    Attributes:
        about: The blame that is to be filled: the port, dtype, case and stage.
        truth: Runs the reference in float64.
        rounded: Runs the reference in the working dtype, whose errors are the baseline; None where that is float64.
        tolerance: Returns the largest error allowed, by the name of a tensor and the error of the baseline.
        distance: Returns how far apart two tensors of one name are.
    """

    about: Blame
    truth: Rerun
    rounded: Rerun | None
    tolerance: Callable[[str, float], float]
    distance: Callable[[str, Arrays, Arrays], float] = distance

    def blocks_of_port(self, port: Rerun, goes_on: Callable[[Arrays, Arrays], bool] | None = None) -> Evidence:
        """Run the port again from the reference's values, or else the reference from the port's.

        Args:
            port: Runs the port.
            goes_on: Whether the port continues with the value that each tap returns, by its own tensors and the given
                ones. If it does not, later blocks get wrong inputs. None: it is known to.
        """
        actual = port({})
        expected = {name: value for name, value in self.truth({}).items() if name in actual}
        given = {name: value for name, value in expected.items() if name != OUTPUT}
        try:
            alone = port(given)
        except Exception:  # what was given may not fit behind a mistake of shape
            alone = {}
        other_way = self.blocks_of_reference(actual, expected)
        if all(same_bits(alone[name], actual[name]) for name in actual if name in alone):
            return other_way
        baseline = self.baseline(given, expected)
        evidence = Evidence(other_way.blame, actual, expected, alone, expected)
        found = self.marked(evidence, PORT, expected, lambda name: self.tolerance(name, baseline.get(name, 0.0)))
        if goes_on is None or found.blame.introduced == other_way.blame.introduced or goes_on(actual, given):
            return found
        return other_way

    def blocks_of_reference(self, actual: Arrays, expected: Arrays) -> Evidence:
        """Let the reference go on from the port's values.

        Args:
            actual: The tensors of the port's own run.
            expected: The tensors of the reference's own run, of the same names.
        """
        given = {
            name: np.asarray(value, np.float64)
            for name, value in actual.items()
            if name != OUTPUT and name in expected and value.shape == expected[name].shape
        }
        with np.errstate(all="ignore"):  # what a mistake left may overflow
            wanted = self.truth(given)
            baseline = self.baseline(given, {name: wanted[name] for name in expected})
        evidence = Evidence(self.about, actual, expected, actual, wanted)
        replayed = REFERENCE if given else NOTHING
        return self.marked(evidence, replayed, expected, lambda name: self.tolerance(name, baseline.get(name, 0.0)))

    def baseline(self, given: Arrays, wanted: Arrays) -> dict[str, float]:
        """Return the reference's own error in the working dtype at each tap, from the same given values."""
        if self.rounded is None:
            return {}
        rounded = self.rounded(given)
        return {name: relative_error(rounded[name], value) for name, value in wanted.items()}

    def marked(
        self, evidence: Evidence, replayed: str, names: Iterable[str], allowed: Callable[[str], float]
    ) -> Evidence:
        """Return the evidence with a mark for every place, in the order of computation."""
        marks = []
        for name in names:
            limit = allowed(name)
            free = self.distance(name, evidence.actual, evidence.expected)
            alone = self.distance(name, evidence.alone, evidence.wanted)
            verdict = FINE if free <= limit else INHERITED
            if not alone <= limit:
                verdict = INTRODUCED
            marks.append(Mark(name, free, alone, limit, verdict))
        return replace(evidence, blame=replace(self.about, replayed=replayed, marks=tuple(marks)))


def without_consequences(
    evidence: Evidence, variants: Iterable[Rerun], distance: Callable[[str, Arrays, Arrays], float] = distance
) -> Evidence:
    """Return the evidence with fewer places of introduction, where a variant of the reference explains them.

    Where a tap of the port shows another value than its name stands for, what follows is run from a wrong input, and
    seems to introduce a difference too. A variant that computes all that the port does at such a place, and introduces
    nothing there, shows that it inherits.

    Args:
        evidence: Of the port.
        variants: References with a known mistake, which reproduce the output of the port.
        distance: Returns how far apart two tensors of one name are.
    """
    given = {name: value for name, value in evidence.expected.items() if name != OUTPUT}
    best: Blame | None = None
    for variant in variants:
        free, alone = variant({}), variant(given)
        marks = tuple(
            replace(mark, verdict=INHERITED)
            if mark.verdict == INTRODUCED
            and distance(mark.name, alone, evidence.expected) <= mark.tolerance
            and distance(mark.name, free, evidence.actual) <= mark.tolerance
            else mark
            for mark in evidence.blame.marks
        )
        found = replace(evidence.blame, marks=marks)
        if found.introduced and len(found.introduced) < len((best or evidence.blame).introduced):
            best = found
    return evidence if best is None else replace(evidence, blame=best)


def same_bits(first: ndarray, second: ndarray) -> bool:
    """Whether two arrays are equal bit by bit."""
    return first.shape == second.shape and first.tobytes() == second.tobytes()
