"""A bug injected into the reference produces the same values as in a port, so these values identify the bug."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.transformer.bugs import search, training
from transformer_parity.transformer.bugs.bug import ALL
from transformer_parity.transformer.bugs.catalog import FORWARD, SEARCH, STRUCTURE, TRAINING
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.ports.protocol import AnyPort, Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.selftest.buggy_ports import injected
from transformer_parity.transformer.selftest.uncompiled import interpreted
from transformer_parity.transformer.stages.training_stage import training_error

OF_THE_MODEL, OTHERS, OF_TRAINING = (
    [bug for part in parts.values() for bug in part] for parts in (FORWARD, STRUCTURE, TRAINING)
)
CASES = {case.name: case for case in standard_cases()} | search.CASES
BUGS = [*OF_THE_MODEL, *OTHERS, *OF_TRAINING, *SEARCH]
CANDIDATES = {f"{bug.name}-{bug.case}": bug for bug in BUGS if "numpy" in bug.edits}
SAME, DIFFERENT = POLICY["float64"]["tap"], 100.0 * POLICY["float64"]["tap"]
ALIKE = 1e-9  # after a step or a search, rounding causes far smaller differences, and a bug causes far larger ones


def case_of(bug: str) -> Case:
    """Return the case of a bug; for a training bug, this is a gradient case or a training case with two steps."""
    found = CANDIDATES[bug]
    if found in OF_TRAINING:
        return replace(training.CASES.get(found.case, training.GRADIENTS), snapshots=(1, 2))
    return CASES[found.case]


def limits(bug: str) -> tuple[float, float]:
    """Return the maximum difference between backends with the same bug, and the minimum from the reference."""
    return (SAME, DIFFERENT) if CANDIDATES[bug] in OF_THE_MODEL + OTHERS else (ALIKE, ALIKE)


def load_and_run(port: AnyPort, case: Case) -> Tensors:
    return tensors(port.load(case.config, case.load_weights(), Placement("float64")), case)


@cache
def run_with(bug: str, name: str) -> Tensors:
    """Run a bug's own case on a port in which the bug is injected."""
    port = injected(CANDIDATES[bug], name)
    with interpreted(name):
        return load_and_run(port, case_of(bug))


def distance(actual: Tensors, expected: Tensors) -> float:
    """Return the largest error of the shared values, or infinity if shapes differ or a value isn't finite."""
    shown = [name for name in expected if name in actual]
    if any(actual[name].shape != expected[name].shape for name in shown):
        return math.inf
    errors = [training_error(name, actual, expected) for name in shown]
    return max(math.inf if math.isnan(error) else error for error in errors)


def in_the_first_port() -> list:
    """Return each candidate with the first port into which it can be injected, as test parameters."""
    ports = {name: next(port for port in ALL if port in bug.edits) for name, bug in CANDIDATES.items()}
    return [pytest.param(bug, name, marks=pytest.mark.only(name)) for bug, name in ports.items()]


def test_every_bug_except_some_structural_ones_is_a_candidate():
    assert [bug.name for bug in BUGS if bug not in (*OTHERS, *CANDIDATES.values())] == []
    assert len(CANDIDATES) == len([bug for bug in BUGS if "numpy" in bug.edits])


@pytest.mark.parametrize("bug", CANDIDATES)
def test_candidate_differs_from_the_reference(bug):
    assert distance(run_with(bug, "numpy"), load_and_run(PORTS["numpy"], case_of(bug))) > limits(bug)[1]


@pytest.mark.parametrize(("bug", "name"), in_the_first_port())
def test_candidate_matches_the_port_with_the_same_bug(bug, name):
    port, candidate = run_with(bug, name), run_with(bug, "numpy")
    assert list(port) == list(candidate)
    assert distance(port, candidate) <= limits(bug)[0]
