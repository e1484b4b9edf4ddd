"""Statements that are measured from the numbers of a port."""

from __future__ import annotations

import numpy as np

from transformer_parity.transformer.cases.case import Case, tiny
from transformer_parity.transformer.cases.inputs import token_ids
from transformer_parity.transformer.diagnose.diagnosis import LIKELY, diagnose
from transformer_parity.transformer.diagnose.hypotheses.hypothesis import hypotheses
from transformer_parity.transformer.diagnose.hypotheses.trials import TRUTH, observed

CONFIG = tiny(d_k=None, d_v=None)
CASE = Case("full/padded", "full model", CONFIG, "", token_ids(CONFIG))
TAP = "source_embedding.output"


def encoding(exponents):
    """Return sines and cosines in turn, of n / 10000^(exponent / d_model)."""
    angles = np.arange(9)[:, None] * 10000.0 ** (-exponents / CONFIG.d_model)
    return np.where(np.arange(CONFIG.d_model) % 2 == 0, np.sin(angles), np.cos(angles))


def diagnosed(added):
    """Return the diagnosis of a port that adds something to the embedded source; all that follows is wrong too."""
    truth = observed(TRUTH, CASE)
    wrong = {name: array + 0.01 * np.abs(array).max() for name, array in truth.items()}
    shown = {**wrong, TAP: truth[TAP] + added}
    return diagnose(CASE, shown, "MyPort", known=hypotheses(CONFIG, CASE.stage)[:5])


def test_angles_of_positions_are_measured():
    """Each channel has a different angle, instead of each pair."""
    channels = np.arange(CONFIG.d_model)
    found = diagnosed(encoding(channels) - encoding(channels // 2 * 2))
    assert found.confidence == LIKELY
    assert found.sentence.endswith("where k = 0, 1, 2, 3, 4, 5, ... instead of 0, 0, 2, 2, 4, 4, ...")


def test_constant_positions_have_no_angles():
    """A constant has no angles."""
    assert "angles" not in diagnosed(0.1).sentence
