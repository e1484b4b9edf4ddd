"""Diagnoses that measure a property of a port from its values."""

from __future__ import annotations

import numpy as np

from transformer_parity.transformer.cases.case import Case, tiny
from transformer_parity.transformer.cases.inputs import token_ids
from transformer_parity.transformer.diagnose.candidates.candidate import candidates
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, observed
from transformer_parity.transformer.diagnose.diagnosis import LIKELY, diagnose

CONFIG = tiny(d_k=None, d_v=None)
CASE = Case("full/padded", "full model", CONFIG, "", token_ids(CONFIG))
TAP = "source_embedding.output"


def encoding(exponents):
    """Return alternating sines and cosines of n / 10000^(exponent / d_model)."""
    angles = np.arange(9)[:, None] * 10000.0 ** (-exponents / CONFIG.d_model)
    return np.where(np.arange(CONFIG.d_model) % 2 == 0, np.sin(angles), np.cos(angles))


def diagnosed(added):
    """Return the diagnosis of a port that adds an array to the embedded source and is wrong in all later values."""
    truth = observed(TRUTH, CASE)
    wrong = {name: array + 0.01 * np.abs(array).max() for name, array in truth.items()}
    shown = {**wrong, TAP: truth[TAP] + added}
    return diagnose(CASE, shown, "MyPort", known=candidates(CONFIG, CASE.stage)[:5])


def test_angles_of_positional_encodings_are_measured():
    """Each channel has a different frequency, instead of each pair of channels."""
    channels = np.arange(CONFIG.d_model)
    found = diagnosed(encoding(channels) - encoding(channels // 2 * 2))
    assert found.confidence == LIKELY
    assert found.sentence.endswith("where k = 0, 1, 2, 3, 4, 5, ... instead of 0, 0, 2, 2, 4, 4, ...")


def test_added_constant_is_not_described_as_angles():
    """The diagnosis of an added constant doesn't mention angles."""
    assert "angles" not in diagnosed(0.1).sentence
