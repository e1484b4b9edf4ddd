"""The comparison of a run on several devices: each planted mistake is found, located and named; right runs agree."""

from __future__ import annotations

from functools import cache

import pytest

import reference_numpy
from reference_numpy import Plan
from transformer_parity.compare.findings import AGREES
from transformer_parity.distributed.cases import probes
from transformer_parity.distributed.compare import Run, findings
from transformer_parity.distributed.worker import Task, train
from transformer_parity.mistakes.distributed import MISTAKES
from transformer_parity.mistakes.edited_package import edited_package

INVISIBLE = ("reduced twice", "norm counts copies")  # in the loss


@cache
def expected(name: str):
    """Return what one device gives, by the name of a case."""
    return train(reference_numpy, task(name))


def task(name: str, plan: Plan | None = None) -> Task:
    """Return the run of a case; ``resumed`` goes on from the middle of another."""
    if name != "resumed":
        return Task(probes()[name], plan)
    return Task(probes()["short"], plan, expected("short").snapshots[2])


def run(mistake):
    """Train with a mistake, and return what was seen, what should have been, and all comparisons."""
    _, plan, name = mistake.case.split("/")
    package = edited_package("reference_numpy", tuple(mistake.edits["numpy"]))
    seen = train(package, task(name, package.Plan.parse(plan)))
    started = task(name)
    return (
        seen,
        expected(name),
        findings("numpy", Run(started.probe, Plan.parse(plan), started.start), [seen], expected(name)),
    )


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_a_mistake_is_found_located_and_named(mistake):
    seen, right, found = run(mistake)
    first = next(finding for finding in found if finding.verdict != AGREES)
    assert first.tap.startswith(mistake.at)
    assert mistake.detail in first.detail
    if mistake.name in INVISIBLE:
        assert seen.losses[:4] == pytest.approx(right.losses[:4], abs=2e-5)
