"""Two sets of named tensors, compared: names and order first, then each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from numpy import ndarray

from transformer_parity.engine.findings import Finding
from transformer_parity.engine.tensors import name_problem, relative_error, structure_problem
from transformer_parity.engine.tolerances import tolerance
from transformer_parity.engine.verdict import Author

NAMES = "names"  # the tap of a finding about names and order
Arrays = Mapping[str, ndarray]


class Measure:
    """How two tensors of one name are compared."""

    def problem(self, name: str, actual: ndarray, expected: ndarray, dtype: str) -> str:
        """Return what is wrong with a tensor before any number is compared; empty if nothing is."""
        return structure_problem(actual, expected, dtype)

    def error(self, name: str, actual: Arrays, expected: Arrays) -> float:
        """Return the error of a tensor; other tensors may set its scale."""
        return relative_error(actual[name], expected[name])


def tolerances(
    truth: Arrays, baseline: Arrays, dtype: str, device: str = "cpu", precision: str = "highest"
) -> dict[str, float]:
    """Return the largest error allowed for each tensor: in float32, by the error of the baseline at the same tensor.

    Args:
        truth: The tensors of the reference in float64.
        baseline: The tensors of the reference in float32; empty if that is not the working dtype.
        dtype: The working dtype of the implementation that is compared.
        device: ``cpu`` or ``gpu``.
        precision: ``highest``, or ``fast``, which allows TF32 on a GPU.
    """
    own = {name: relative_error(baseline[name], truth[name]) for name in truth if name in baseline}
    return {name: tolerance(name, dtype, own.get(name, 0.0), precision, device) for name in truth}


def compare_names(
    author: Author, path: str, actual: Sequence[str], expected: Sequence[str], *, ordered: bool
) -> Iterator[Finding]:
    """Yield a finding if the names differ, or if ``ordered`` names come in a different order."""
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
        author: Makes the findings.
        path: How the actual tensors were obtained.
        names: Names that both sides have.
        actual: The tensors of the implementation.
        expected: The tensors that it must yield.
        tolerances: The largest error that agrees, by name.
        measure: How two tensors are compared.
    """
    for name in names:
        tolerance = tolerances[name]
        if problem := measure.problem(name, actual[name], expected[name], author.dtype):
            yield author.compared(path, name, math.inf, tolerance, problem=problem)
        else:
            yield author.compared(path, name, measure.error(name, actual, expected), tolerance)
