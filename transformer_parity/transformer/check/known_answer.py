"""The known-answer test: the reference beside a port must compute what it computes in a new process.

A port that replaces a function of NumPy, or of the reference, changes the truth that it is compared with. So the same
cases are computed in a new process, where no port is imported. Numbers are compared by Python's own arithmetic, and the
function that measures errors is tested with it.
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
TOLERANCE = 1e-13  # of two processes that run the same code on the same machine
WORK = "transformer_parity.transformer.check.known_answer:work"  # what the other process runs
Answers = dict[str, dict[str, ndarray]]


def work(parent: Parent) -> None:
    """Receive cases, and send what the reference yields."""
    try:
        parent.send(answers(parent.receive()))
    except Exception as error:
        parent.send(described(error))


def answers(cases: Sequence[Case]) -> Answers:
    """Return what the reference yields in each case in float64, and what a few functions of NumPy do."""
    reference = Reference()  # a new one: what was computed before the port ran is not asked for
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
    """Return what the reference in this process computes otherwise than in a new one; empty if nothing.

    Args:
        cases: What a port was run on; of each stage, the main cases are computed.
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
    """Return the first tensor that differs; tokens must be equal."""
    if list(own) != list(clean):
        return f"{case}: the reference in this process yields other tensors than in a new one"
    for name, truth in clean.items():
        error = math.inf if own[name].shape != truth.shape else _plain_error(own[name], truth)
        if not error <= (0.0 if name == TOKENS else TOLERANCE):
            allowed = "they must be equal" if name == TOKENS else f"at most {TOLERANCE:.0e}"
            return f"{case} {name}: error {error:.1e} against what a new process computes, {allowed}"
    return ""


def _plain_error(actual: ndarray, expected: ndarray) -> float:
    """Return the relative error, computed without NumPy; equal values, infinite ones too, are no difference."""
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
    """Return what is wrong with the function that measures errors; empty if nothing is."""
    expected = [(-1.0) ** i * (1.0 + 0.5 * i) for i in range(20)]
    actual = [number + 0.001 * (i % 3) for i, number in enumerate(expected)]
    known = math.dist(actual, expected) / math.hypot(*expected)
    measured = relative_error(np.array(actual).reshape(4, 5), np.array(expected).reshape(4, 5))
    if not abs(float(measured) - known) <= TOLERANCE * known:
        return f"relative_error yields {float(measured):.17g} in this process, which must be {known:.17g}"
    return ""
