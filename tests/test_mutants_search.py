"""The checker, checked: known mistakes of decoding are planted one at a time, and each is caught and located."""

from __future__ import annotations

import pytest
from conftest import interpreted
from mutants import ALL, planted
from mutants_search import CASES, CATALOGUE

from transformer_parity.compare import AGREES, DIVERGES, Setting, compare


def run(name, mistake, folder):
    """Compare a port that has the mistake with the reference, and return what does not agree."""
    with planted(mistake, name, folder) as port, interpreted(name):
        findings = list(compare([CASES[mistake.case]], port, Setting(("float64",))))
    assert len(findings) > 1
    return [finding for finding in findings if finding.verdict != AGREES]


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param(name, mistake, id=f"{name}-{mistake.name}", marks=pytest.mark.only(name))
        for name in ALL
        for mistake in CATALOGUE
    ],
)
def test_mistake_is_caught_and_located(name, mistake, tmp_path):
    failures = run(name, mistake, tmp_path)
    assert failures, "not caught"
    first = failures[0]
    assert (first.path, first.tap, first.verdict) == (mistake.path, mistake.at, DIVERGES), first.detail
