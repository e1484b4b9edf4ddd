"""Positions in float32: evidence that a port computed angles or sines in float32."""

from __future__ import annotations

import numpy as np

from reference_numpy.embedding import sinusoidal_encoding
from transformer_parity.transformer.diagnose.trials import TRUTH, Trials, observed

EXACT = 1e-14  # relative: rounding of a sum in float64 leaves less, and numbers of float32 are 1e-8 apart


def float32_positions(trials: Trials, first: str, port: str) -> str:
    """Say whether the position encoding consists of float32 numbers; empty if it doesn't, or if it can't be told."""
    config, usual = trials.case.config, observed(TRUTH, trials.case)
    if not first.endswith("_embedding.output") or usual is None or config.position_encoding != "sinusoidal":
        return ""
    actual, wanted = trials.actual[first], usual[first]
    if config.embedding_norm or actual.shape != wanted.shape:
        return ""
    layout, timescale, offset = config.position_layout, config.position_timescale, config.position_offset
    added = actual - wanted + sinusoidal_encoding(wanted.shape[1], config.d_model, layout, timescale, offset)
    rounded = np.where(actual == wanted, added, added.astype(np.float32))  # padding has the reference's values
    if not np.abs(added - rounded).max() <= EXACT * np.abs(wanted).max():
        return ""
    return f"the positions that {port} adds at {first} are float32 numbers: compute angles and sines in float64"
