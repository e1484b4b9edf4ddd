"""Localization: find the tensors at which a difference starts, and the tensors that only inherit a difference.

After the first bug in a port, all tensors differ from the reference's tensors, so a comparison doesn't show which
blocks contain bugs. Therefore, each block is rerun, either on the correct input or on the port's input:

- If the port continues its computation with the value that each tap returns, the port runs a second time, and every tap
  returns the reference's value. Each tensor is then the result of one block of the port on correct inputs.
- If the port ignores the values that taps return, or if only files are available, the reference runs a second time, and
  every tap returns the port's value. If the reference then computes the same tensor as the port, the block that
  computes this tensor is correct, and the difference is in the input of the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.outputs import is_output
from transformer_parity.engine.tensors import Tensors, relative_error

INTRODUCED, INHERITED, FINE = "introduced", "inherited", "fine"
PORT, REFERENCE, NOTHING = "port", "reference", "nothing"  # the implementation whose blocks were rerun
# A function that takes values for some taps, runs the model with these values, and returns all tensors of the run.
Rerun = Callable[[Arrays], Tensors]


@dataclass(frozen=True)
class Mark:
    """The errors of one tensor.

    Attributes:
        name: The name of a tap. In the backward pass, the prefix ``at`` denotes the gradient at a tap, and ``of`` the
            gradient of a parameter.
        free: The error in the port's normal run.
        isolated: The error of the tensor if the inputs of its block are correct; infinite if unknown.
        tolerance: The largest accepted error.
        verdict: ``introduced`` here, ``inherited`` from an earlier tensor, or ``fine``.
    """

    name: str
    free: float
    isolated: float
    tolerance: float
    verdict: str


@dataclass(frozen=True)
class Blame:
    """The tensors at which the differences in one case start.

    Attributes:
        backend: The port.
        dtype: The working dtype.
        case: The name of the case.
        stage: The stage of the case.
        replayed: The implementation whose blocks were rerun, ``port`` or ``reference``; ``nothing`` if the port has no
            taps.
        marks: The errors of all tensors, in the order of computation.
    """

    backend: str
    dtype: str
    case: str
    stage: str
    replayed: str = NOTHING
    marks: tuple[Mark, ...] = ()

    @property
    def introduced(self) -> list[str]:
        """The names of the tensors at which a difference was introduced, in the order of computation."""
        return [mark.name for mark in self.marks if mark.verdict == INTRODUCED]

    to_dict = asdict  # the fields as built-in Python types


@dataclass(frozen=True)
class Evidence:
    """The tensors from which a ``Blame`` is computed.

    Attributes:
        blame: The marks that have been computed so far.
        actual: The tensors of the port's normal run.
        expected: The tensors of the reference's normal run.
        isolated: The tensors that the port computes if each block receives the reference's values as inputs. If only
            the reference was rerun, these are the tensors of the port's normal run.
        wanted: The tensors that the reference computes from the same inputs as ``isolated``.
    """

    blame: Blame
    actual: Arrays
    expected: Arrays
    isolated: Arrays
    wanted: Arrays


def distance(name: str, actual: Arrays, expected: Arrays) -> float:
    """Return the relative error between two tensors, or infinity if ``apart`` can't compare them."""
    return apart(name, actual, expected, lambda name, mine, theirs: relative_error(mine[name], theirs[name]))


def apart(name: str, actual: Arrays, expected: Arrays, error: Callable[[str, Arrays, Arrays], float]) -> float:
    """Return the error that a function computes, or infinity if the tensors can't be compared.

    Two tensors can't be compared if one of them is missing, if their shapes differ, or if NaN or infinite elements are
    not at the same positions in both.

    Args:
        name: The name of the tensor.
        actual: The tensors of the port.
        expected: The tensors of the reference.
        error: A function that returns the error between two finite tensors of the same shape.
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
    """Reruns the blocks of a port or of the reference on given intermediate values.

    Attributes:
        about: A ``Blame`` that specifies the port, dtype, case, and stage. It has no marks.
        truth: A function that runs the reference in float64.
        rounded: A function that runs the reference in the working dtype, to measure the reference's own error; None for
            float64.
        tolerance: A function that takes the name of a tensor and the reference's own error, and returns the tolerance
            for the tensor.
        distance: A function that returns the error between two tensors with the same name.
    """

    about: Blame
    truth: Rerun
    rounded: Rerun | None
    tolerance: Callable[[str, float], float]
    distance: Callable[[str, Arrays, Arrays], float] = distance

    def blocks_of_port(self, port: Rerun, goes_on: Callable[[Arrays, Arrays], bool] | None = None) -> Evidence:
        """Rerun the port on the reference's values. If the port ignores them, rerun the reference on the port's values.

        Args:
            port: A function that runs the port.
            goes_on: A function that returns whether the port's later blocks use the values that the taps return. If the
                port ignores these values, later blocks get incorrect inputs. The arguments of the function are the
                tensors of the port's normal run and the reference's tensors. Use None if the port is known to use the
                values.
        """
        actual = port({})
        expected = {name: value for name, value in self.truth({}).items() if name in actual}
        given = {name: value for name, value in expected.items() if not is_output(name)}
        try:
            isolated = port(given)
        except Exception:  # a shape in the port may be incorrect and therefore incompatible with the given value
            isolated = {}
        other_way = self.blocks_of_reference(actual, expected)
        if all(same_bits(isolated[name], actual[name]) for name in actual if name in isolated):
            return other_way
        baseline = self.baseline(given, expected)
        evidence = Evidence(other_way.blame, actual, expected, isolated, expected)
        found = self.marked(evidence, PORT, expected, lambda name: self.tolerance(name, baseline.get(name, 0.0)))
        if goes_on is None or found.blame.introduced == other_way.blame.introduced or goes_on(actual, given):
            return found
        return other_way

    def blocks_of_reference(self, actual: Arrays, expected: Arrays) -> Evidence:
        """Rerun the reference on the port's values.

        Args:
            actual: The tensors of the port's normal run.
            expected: The tensors of the reference's normal run, with the same names.
        """
        given = {
            name: np.asarray(value, np.float64)
            for name, value in actual.items()
            if not is_output(name) and name in expected and value.shape == expected[name].shape
        }
        with np.errstate(all="ignore"):  # incorrect values may overflow
            wanted = self.truth(given)
            baseline = self.baseline(given, {name: wanted[name] for name in expected})
        evidence = Evidence(self.about, actual, expected, actual, wanted)
        replayed = REFERENCE if given else NOTHING
        return self.marked(evidence, replayed, expected, lambda name: self.tolerance(name, baseline.get(name, 0.0)))

    def baseline(self, given: Arrays, wanted: Arrays) -> dict[str, float]:
        """Run the reference in the working dtype on the given values, and return the rounding error at each tap.

        If a given value is NaN or infinite and the error therefore isn't finite, the error is set to 0.
        """
        if self.rounded is None:
            return {}
        rounded = self.rounded(given)
        errors = {name: relative_error(rounded[name], value) for name, value in wanted.items()}
        return {name: error if math.isfinite(error) else 0.0 for name, error in errors.items()}

    def marked(
        self, evidence: Evidence, replayed: str, names: Iterable[str], allowed: Callable[[str], float]
    ) -> Evidence:
        """Return the evidence with a ``Mark`` for every tensor, in the order of computation."""
        marks = []
        is_misshapen = False  # whether the rerun couldn't use an earlier tensor because its shape is wrong
        for name in names:
            limit = allowed(name)
            free = self.distance(name, evidence.actual, evidence.expected)
            isolated = self.distance(name, evidence.isolated, evidence.wanted)
            verdict = FINE if free <= limit else INHERITED
            if not (isolated <= limit or is_misshapen):
                verdict = INTRODUCED
            marks.append(Mark(name, free, isolated, limit, verdict))
            if replayed == REFERENCE and name in evidence.actual and name in evidence.expected:
                is_misshapen |= evidence.actual[name].shape != evidence.expected[name].shape
        return replace(evidence, blame=replace(self.about, replayed=replayed, marks=tuple(marks)))


def without_consequences(
    evidence: Evidence, variants: Iterable[Rerun], distance: Callable[[str, Arrays, Arrays], float] = distance
) -> Evidence:
    """Mark a difference as inherited instead of introduced if a variant of the reference confirms this.

    If the port reports an incorrect tensor under a tap's name, the next block is rerun on an incorrect input and seems
    to introduce a second difference. To test this, variants of the reference with known bugs are run. The second
    difference is inherited if a variant meets two conditions. In a normal run of the variant, the block computes the
    same tensor as in the port. In a rerun of the variant on correct inputs, the block computes the correct tensor.

    Args:
        evidence: The evidence about the port.
        variants: Variants of the reference, each with a known bug that reproduces the port's output.
        distance: A function that returns the error between two tensors with the same name.
    """
    given = {name: value for name, value in evidence.expected.items() if not is_output(name)}
    best: Blame | None = None
    for variant in variants:
        free, isolated = variant({}), variant(given)
        marks = tuple(
            replace(mark, verdict=INHERITED)
            if mark.verdict == INTRODUCED
            and distance(mark.name, isolated, evidence.expected) <= mark.tolerance
            and distance(mark.name, free, evidence.actual) <= mark.tolerance
            else mark
            for mark in evidence.blame.marks
        )
        found = replace(evidence.blame, marks=marks)
        if found.introduced and len(found.introduced) < len((best or evidence.blame).introduced):
            best = found
    return evidence if best is None else replace(evidence, blame=best)


def same_bits(first: ndarray, second: ndarray) -> bool:
    """Return whether two arrays are bitwise identical."""
    return first.shape == second.shape and first.tobytes() == second.tobytes()
