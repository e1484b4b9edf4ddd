"""The cases for ports cover all pairs of their dimensions, which are measured from the cases themselves."""

from __future__ import annotations

import pytest
from variety import DIMENSIONS, ONCE, missing, once

from transformer_parity.transformer.cases.case import TOKENS, in_stages, tiny
from transformer_parity.transformer.cases.for_ports import port_cases

CONFIG = tiny(d_v=8)
CASES = {stage: in_stages(port_cases(CONFIG), DIMENSIONS) for stage in DIMENSIONS}
SMALL = {s: [c for c in cases if c.stage == s and c.config.source_vocab_size == TOKENS] for s, cases in CASES.items()}


@pytest.mark.parametrize("stage", DIMENSIONS)
def test_the_cases_for_ports_cover_all_pairs_of_dimensions(stage):
    assert missing(stage, SMALL[stage]) == []


@pytest.mark.parametrize("stage", DIMENSIONS)
def test_the_cases_for_ports_have_each_value_that_is_not_paired(stage):
    found = set().union(*(once(case) for case in CASES[stage] if case.stage == stage))
    assert sorted(ONCE[stage] - found) == []
