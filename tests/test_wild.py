"""The committed results on pairs in the wild cover all pairs, and each difference has a cause."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
RESULTS = TESTS.parent / "docs" / "results"
PAIRS = json.loads((RESULTS / "wild-pairs.json").read_text("utf-8"))["pairs"]
CAUSES = tomllib.loads((RESULTS / "wild-causes.toml").read_text("utf-8"))


def test_every_difference_has_a_cause():
    differing = {(one["library"], one["name"]) for one in PAIRS if one["verdict"] != "AGREE"}
    assert differing == {(library, name) for library, names in CAUSES.items() for name in names}


def test_every_divergence_has_a_place():
    assert all(one["introduced"] for one in PAIRS if one["verdict"] in ("DIVERGE", "IMPRECISE"))
    assert all(one["detail"] for one in PAIRS if one["verdict"] == "INCOMPLETE")


@pytest.mark.parametrize("library", ["mlx-lm", "keras-hub"])
def test_results_contain_at_least_25_pairs_of_each_library(library):
    names = [one["name"] for one in PAIRS if one["library"] == library]
    assert len(names) == len({*names}) >= 25


def test_reproductions_are_short():
    text = (TESTS / "wild" / "reproductions.md").read_text("utf-8")
    programs = [part.partition("```")[0].strip() for part in text.split("```python\n")[1:]]
    assert len(programs) >= 20
    for program in programs:
        assert sum(bool(line) for line in program.splitlines()) <= 15, program
        ast.parse(program)
