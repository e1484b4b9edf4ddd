"""Public bugs of ports: ``parity pair`` finds each of them, at the right place, and accepts the fixed ports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from port_bugs import exam

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "port-bugs.json"
USUAL = ("gemma_norm_offset", "control_grouped_keys", "decode_position_gap")  # the other examples take longer


def _examples() -> list:
    usual = pytest.mark.only("torch")
    return [
        pytest.param(name, marks=[usual] if name in USUAL else [usual, pytest.mark.extended("port bugs")])
        for name in exam.examples([])
    ]


@pytest.mark.parametrize("name", _examples())
def test_bug_is_found_and_located(name):
    for kind in ["Port"] + ["Fixed"] * exam.facts(name)["has_fixed"]:
        found = exam.trial(name, kind)
        assert found["is_found"], found
        assert found["is_located"], found


def test_committed_results_cover_every_example():
    ports = json.loads(RESULTS.read_text("utf-8"))["ports"]
    examples = exam.examples([])
    assert {one["name"] for one in ports} == set(examples)
    assert len(examples) >= 38
    bugs, right = [one for one in ports if one["is_bug"]], [one for one in ports if not one["is_bug"]]
    assert len(bugs) >= 30
    assert sum(one["port"] == "Port" for one in right) >= 8
    assert sum(one["is_found"] for one in bugs) >= 0.95 * len(bugs)
    assert sum(one["is_located"] for one in bugs) >= 0.9 * len(bugs)
    assert all(one["is_found"] for one in right)


def test_every_example_names_its_source():
    for name in exam.examples([]):
        about = exam.facts(name)
        assert about["KIND"] in ("bug", "control"), name
        assert about["KIND"] == "control" or about["SOURCE"], name
        assert about["STAGE"] in ("forward", "gradients", "decode"), name
