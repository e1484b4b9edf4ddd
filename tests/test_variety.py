"""The cases for ports cover all pairs of values of their dimensions, which are measured from the cases themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from variety import DIMENSIONS, ONCE, missing, once

from transformer_parity.transformer.cases.case import TOKENS, in_stages, tiny
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.cases.variety import variants
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.registry import PORTS

CONFIG = tiny(d_v=8)
CASES = {stage: in_stages(port_cases(CONFIG), DIMENSIONS) for stage in DIMENSIONS}
SMALL = {s: [c for c in cases if c.stage == s and c.config.source_vocab_size == TOKENS] for s, cases in CASES.items()}


@pytest.mark.parametrize("stage", DIMENSIONS)
def test_port_cases_cover_all_pairs_of_dimensions(stage):
    assert missing(stage, SMALL[stage]) == []


@pytest.mark.parametrize("stage", DIMENSIONS)
def test_port_cases_cover_each_unpaired_value(stage):
    found = set().union(*(once(case) for case in CASES[stage] if case.stage == stage))
    assert sorted(ONCE[stage] - found) == []


@pytest.mark.parametrize("final_norm", [False, True])
@pytest.mark.parametrize("norm_order", ["post", "pre"])
def test_rounding_in_large_cases_is_far_below_the_tolerance(norm_order, final_norm):
    config = tiny("bart", norm_order=norm_order, final_norm=final_norm)
    cases = [case for case in variants(config, seed=18) if case.magnitude == "large"]
    port = replace(PORTS["numpy"], fast=True)
    found = list(compare([replace(case, before=()) for case in cases], port, Placements(("float64",))))
    assert len(found) > 400
    assert max(found, key=lambda finding: finding.ratio).ratio < 0.4
