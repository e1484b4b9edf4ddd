"""A mistake planted in the reference computes what it computes in a port: the numbers by which it is recognised."""

from __future__ import annotations

import math
from functools import cache

import pytest

from transformer_parity.engine.tensors import relative_error
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.mistakes.catalogue import FORWARD, STRUCTURE
from transformer_parity.transformer.mistakes.mistake import ALL
from transformer_parity.transformer.ports.protocol import Implementation, Placement, Result
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.selftest.planted_ports import planted
from transformer_parity.transformer.selftest.uncompiled import interpreted

CASES_BY_NAME = {case.name: case for case in standard_cases()}
OF_THE_MODEL = [mistake for part in FORWARD.values() for mistake in part]
OTHERS = [mistake for part in STRUCTURE.values() for mistake in part]
EVERY = OF_THE_MODEL + OTHERS
HYPOTHESES = {f"{mistake.name}-{mistake.case}": mistake for mistake in EVERY if "numpy" in mistake.edits}
SAME = POLICY["float64"]["tap"]


def load_and_run(port: Implementation, case: Case) -> Result:
    loaded = port.load(case.config, case.load_weights(), Placement("float64"))
    return loaded.run(case.block, case.inputs, taps=True)


@cache
def correct(case_name: str) -> Result:
    return load_and_run(PORTS["numpy"], CASES_BY_NAME[case_name])


@cache
def run_with(mistake: str, name: str) -> Result:
    """Run a mistake's own case on a port that has the mistake."""
    hypothesis = HYPOTHESES[mistake]
    port = planted(hypothesis, name)
    with interpreted(name):
        return load_and_run(port, CASES_BY_NAME[hypothesis.case])


def distance(actual: Result, expected: Result) -> float:
    """Return the largest relative error of the taps of both and of the output; infinite where shapes differ."""
    pairs = [(actual.taps[tap], value) for tap, value in expected.taps.items() if tap in actual.taps]
    pairs.append((actual.output, expected.output))
    return max(relative_error(*pair) if pair[0].shape == pair[1].shape else math.inf for pair in pairs)


def in_the_first_port() -> list:
    """Return each hypothesis with the first port that it can be planted in, as parameters of a test."""
    ports = {name: next(port for port in ALL if port in mistake.edits) for name, mistake in HYPOTHESES.items()}
    return [pytest.param(mistake, name, marks=pytest.mark.only(name)) for mistake, name in ports.items()]


def test_every_mistake_of_the_forward_pass_is_a_hypothesis():
    assert [mistake.name for mistake in OF_THE_MODEL if mistake not in HYPOTHESES.values()] == []
    assert len(HYPOTHESES) == len([mistake for mistake in EVERY if "numpy" in mistake.edits])


@pytest.mark.parametrize("mistake", HYPOTHESES)
def test_hypothesis_differs_from_the_reference(mistake):
    assert distance(run_with(mistake, "numpy"), correct(HYPOTHESES[mistake].case)) > 100.0 * SAME


@pytest.mark.parametrize(("mistake", "name"), in_the_first_port())
def test_hypothesis_computes_what_the_port_computes(mistake, name):
    port, hypothesis = run_with(mistake, name), run_with(mistake, "numpy")
    assert list(port.taps) == list(hypothesis.taps)
    assert distance(port, hypothesis) <= SAME
