"""The checker, checked: known mistakes of training are planted one at a time, and each is caught and located."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import test_dropout
from conftest import Backend
from misbehaviour import MISBEHAVIOUR

from transformer_parity.engine.findings import AGREES, Finding
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.mistakes.catalogue import TRAINING
from transformer_parity.transformer.mistakes.mistake import ALL, Mistake
from transformer_parity.transformer.mistakes.optimizer import CONTROLS
from transformer_parity.transformer.mistakes.training import CASES, GRADIENTS
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.selftest.planted_ports import planted
from transformer_parity.transformer.selftest.uncompiled import interpreted


def in_every_port(mistakes: list[Mistake]) -> list:
    return [
        pytest.param(name, mistake, id=f"{name}-{mistake.name}", marks=pytest.mark.only(name))
        for name in ALL
        for mistake in mistakes
        if name in mistake.edits
    ]


RANDOM = ("check_seed", "check_slices", "check_callers_numbers")  # which each framework does in its own way


def for_every_check() -> list:
    """Return each misbehaviour in each port; in JAX and TensorFlow, all but the first of these checks are extended."""
    parameters, seen = [], set()
    for parameter in in_every_port(MISBEHAVIOUR):
        name, mistake = parameter.values
        shown = mistake.check[0] in RANDOM or name == "numpy"
        if name != "torch" and ((name, mistake.check[0]) in seen or not shown):
            parameter = pytest.param(
                *parameter.values, id=parameter.id, marks=[*parameter.marks, pytest.mark.extended("mistakes")]
            )
        parameters.append(parameter)
        seen.add((name, mistake.check[0]))
    return parameters


def run(name: str, mistake: Mistake) -> list[Finding]:
    """Compare a port that has the mistake with the reference, and return what does not agree."""
    snapshots = (1,) if mistake.at.startswith("step 1") else (1, 2)
    case = replace(CASES.get(mistake.case, GRADIENTS), snapshots=snapshots)
    port = planted(mistake, name)
    with interpreted(name):
        findings = list(compare([case], port, Placements(("float64",))))
    assert len(findings) > 1
    return [finding for finding in findings if finding.verdict != AGREES]


@pytest.mark.parametrize(("name", "control"), in_every_port(CONTROLS))
@pytest.mark.extended("equivalent mathematics", "jax", "tf")
def test_equivalent_mathematics_raises_no_alarm(name, control):
    assert run(name, control) == []


@pytest.mark.parametrize(("name", "mistake"), for_every_check())
def test_misbehaviour_is_caught_by_its_check(name, mistake):
    check, *arguments = mistake.check
    backend = Backend(name, planted(Mistake(mistake.name, "", mistake.edits), name).import_package())
    compiled = nullcontext() if check == "check_mixed_precision" else test_dropout.interpreted(backend)
    with compiled, pytest.raises(AssertionError, match=re.escape(mistake.complaint)):
        getattr(test_dropout, check)(backend, *arguments)


def test_every_part_of_training_is_spoilt_in_every_port():
    for part, mistakes in TRAINING.items():
        assert {name for mistake in mistakes for name in mistake.edits} >= {*ALL}, part
