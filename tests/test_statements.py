"""Statements about the error of a block in a batch with padding."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from transformer_parity.transformer.cases.case import Case, tiny
from transformer_parity.transformer.cases.inputs import token_ids
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, observed
from transformer_parity.transformer.diagnose.statements import of_error, of_rounding
from transformer_parity.transformer.stages.padding import Read

CONFIG = tiny(d_k=None, d_v=None)
CASE = Case("full/padded", "full model", CONFIG, "", token_ids(CONFIG), compares_padding=False)
NAME = "encoder.layers.0.feed_forward.output"
BIAS = "encoder.layers.0.feed_forward.output_proj.bias"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda right: right - CASE.load_weights()[BIAS], f"{BIAS} is missing"),
        (lambda right: 0.5 * right, "all values are 0.5 times the correct ones"),
        (lambda right: right[..., ::-1], "the last axis is permuted"),
        (lambda right: right.astype(np.float32).astype(float), "every value has only float32 precision"),
    ],
)
def test_padding_does_not_hide_the_cause_of_an_error(change, words):
    """A port has the reference's values at padding positions, which no other block uses."""
    wanted = observed(TRUTH, CASE)
    isolated = Read.of(CASE, wanted).combine({**wanted, NAME: change(wanted[NAME])}, wanted)
    blame = SimpleNamespace(introduced=[NAME], dtype="float64")
    evidence = SimpleNamespace(blame=blame, isolated=isolated, wanted=wanted)
    (first, *_) = [*of_rounding(evidence, CASE), *of_error(evidence, CASE)]
    assert first.startswith(f"at {NAME}, {words}")
