"""The known-answer test: the reference must compute the same values in the port's process as in a new process.

A port that replaces a function of NumPy or of the reference changes the expected values. To detect such a change, the
test recomputes the same cases in a new process that imports no port. The test compares the values using only Python
floats, because NumPy itself may have been modified. It also tests the function that measures errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from transformer_parity.engine.processes.child import ChildEndedError
from transformer_parity.engine.processes.children import Children
from transformer_parity.engine.processes.messages import Parent
from transformer_parity.engine.tensors import relative_error
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.ports.exceptions import described
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.stages.decode import TOKENS

MAIN = ("full/padded", "gradients/padded", "steps/port", "decode/port_greedy", "decode/port_beam")
TOLERANCE = 1e-13  # maximum relative error between two processes that run the same code on the same machine
WORK = "transformer_parity.transformer.check.known_answer:work"  # entry point of the new process
Answers = dict[str, dict[str, ndarray]]


def work(parent: Parent) -> None:
    """Receive cases and send back the values that the reference computes for them."""
    try:
        parent.send(answers(parent.receive()))
    except Exception as error:
        parent.send(described(error))


def answers(cases: Sequence[Case]) -> Answers:
    """Return the reference's float64 values for each case, and the results of a few NumPy functions."""
    reference = Reference()  # a new object, which doesn't contain values that were cached before the port ran
    found = {case.name: reference.expected(case, Placement("float64")).tensors for case in cases}
    x = np.linspace(0.1, 2.0, 24).reshape(4, 6)
    functions = {
        "exp": np.exp(x),
        "sqrt": np.sqrt(x),
        "broadcast_arrays": np.stack(np.broadcast_arrays(x, x[:1])),
        "linalg.norm": np.asarray(np.linalg.norm(x)),
    }
    return {**found, "numpy": functions}


def changed(cases: Sequence[Case]) -> str:
    """Return a description of the first value that differs between this process and a new process.

    The result is empty if no value differs.

    Args:
        cases: Cases that a port has run. Only the main case of each stage is recomputed.
    """
    due = [case for case in cases if case.name in MAIN]
    try:
        if why := _measure_problem():
            return why
        own = answers(due)
    except Exception as error:
        return f"the reference fails in this process: {described(error)}"
    with Children() as children:
        child = children.start(WORK)
        child.send(due)
        try:
            clean = child.receive()
        except ChildEndedError as error:
            return f"the reference could not be computed in a new process: {error}"
    if isinstance(clean, str):
        return f"the reference fails in a new process: {clean}"
    return next((why for case in clean for why in [_difference(case, own.get(case, {}), clean[case])] if why), "")


def _difference(case: str, own: dict[str, ndarray], clean: dict[str, ndarray]) -> str:
    """Return a description of the first tensor that differs, or an empty string. Tokens must be identical."""
    if list(own) != list(clean):
        return f"{case}: the reference returns different tensors in this process than in a new process"
    for name, truth in clean.items():
        error = math.inf if own[name].shape != truth.shape else _plain_error(own[name], truth)
        if not error <= (0.0 if name == TOKENS else TOLERANCE):
            allowed = "tokens must be equal" if name == TOKENS else f"at most {TOLERANCE:.0e}"
            return f"{case} {name}: error {error:.1e} compared with a new process, {allowed}"
    return ""


def _plain_error(actual: ndarray, expected: ndarray) -> float:
    """Return the relative error, computed without NumPy. Equal infinite values have an error of 0."""
    pairs = list(zip(_numbers(actual), _numbers(expected), strict=True))
    difference = math.hypot(*(a - b for a, b in pairs if a != b))
    norm = math.hypot(*(b for _, b in pairs if math.isfinite(b)))
    return difference / norm if norm else (math.inf if difference else 0.0)


def _numbers(array: ndarray) -> list[float]:
    nested = array.tolist()
    for _ in range(array.ndim - 1):
        nested = [number for row in nested for number in row]
    return [float(number) for number in (nested if array.ndim else [nested])]


def _measure_problem() -> str:
    """Return a description of the problem if ``relative_error`` returns a wrong value, else an empty string."""
    expected = [(-1.0) ** i * (1.0 + 0.5 * i) for i in range(20)]
    actual = [number + 0.001 * (i % 3) for i, number in enumerate(expected)]
    known = math.dist(actual, expected) / math.hypot(*expected)
    measured = relative_error(np.array(actual).reshape(4, 5), np.array(expected).reshape(4, 5))
    if not abs(float(measured) - known) <= TOLERANCE * known:
        return f"relative_error must return {known:.17g}: got {float(measured):.17g} in this process"
    return ""
