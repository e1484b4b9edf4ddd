"""Compare two sets of named tensors: first their names and order, then each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from numpy import ndarray

from transformer_parity.engine.findings import Finding
from transformer_parity.engine.tensors import name_problem, relative_error, structure_problem
from transformer_parity.engine.tolerances import tolerance
from transformer_parity.engine.verdict import Author

NAMES = "names"  # the tap name used for findings about names and order
Arrays = Mapping[str, ndarray]


class Measure:
    """The rule for comparing two tensors with the same name. Subclasses can define different rules."""

    def problem(self, name: str, actual: ndarray, expected: ndarray, dtype: str) -> str:
        """Return a description of an incorrect shape, an incorrect dtype, or non-finite values.

        If there is no problem, return an empty string.
        """
        return structure_problem(actual, expected, dtype)

    def error(self, name: str, actual: Arrays, expected: Arrays) -> float:
        """Return the error of a tensor. The error can be relative to the norms of other tensors."""
        return relative_error(actual[name], expected[name])


def tolerances(
    truth: Arrays, baseline: Arrays, dtype: str, device: str = "cpu", precision: str = "highest"
) -> dict[str, float]:
    """Return the tolerance for each tensor. In float32, it depends on the rounding error of the reference.

    Args:
        truth: The tensors of the reference in float64.
        baseline: The tensors of the reference in float32; empty if the working dtype is not float32.
        dtype: The working dtype of the implementation under test.
        device: ``cpu`` or ``gpu``.
        precision: ``highest``, or ``fast``, which allows TF32 on a GPU.
    """
    own = {name: relative_error(baseline[name], truth[name]) for name in truth if name in baseline}
    return {name: tolerance(name, dtype, own.get(name, 0.0), precision, device) for name in truth}


def compare_names(
    author: Author, path: str, actual: Sequence[str], expected: Sequence[str], *, ordered: bool
) -> Iterator[Finding]:
    """Yield a finding if the names differ or, with ``ordered``, if their order differs."""
    if (actual != expected) if ordered else (sorted(actual) != sorted(expected)):
        yield author.compared(path, NAMES, math.inf, 0.0, problem=name_problem(actual, expected))


def compare_tensors(
    author: Author,
    path: str,
    names: Iterable[str],
    actual: Arrays,
    expected: Arrays,
    tolerances: Mapping[str, float],
    measure: Measure,
) -> Iterator[Finding]:
    """Yield a finding for each tensor.

    Args:
        author: The object that creates the findings.
        path: The path that produced the actual tensors. ``outputs`` defines all paths.
        names: The names of the tensors to compare, which must be in both ``actual`` and ``expected``.
        actual: The tensors of the implementation under test.
        expected: The correct tensors.
        tolerances: The largest accepted errors, keyed by tensor name.
        measure: The rule that compares two tensors.
    """
    for name in names:
        tolerance = tolerances[name]
        if problem := measure.problem(name, actual[name], expected[name], author.dtype):
            yield author.compared(path, name, math.inf, tolerance, problem=problem)
        else:
            yield author.compared(path, name, measure.error(name, actual, expected), tolerance)
