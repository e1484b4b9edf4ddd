"""What an error looks like, read off two tensors."""

import math

import numpy as np
import pytest

from transformer_parity.cases.case import tiny
from transformer_parity.diagnose.signatures import growth, signatures

CONFIG = tiny()  # d_model 24, three heads, d_k 8, d_v 10
RNG = np.random.default_rng(0)
STATES = RNG.normal(size=(4, 7, 24))
HEADS = RNG.normal(size=(4, 3, 7, 8))
BIAS = RNG.normal(size=24).astype(np.float32)


def spoilt(array, where, by=1.0):
    changed = array.copy()
    changed[where] += by
    return changed


@pytest.mark.parametrize(
    ("actual", "wanted", "said"),
    [
        (STATES * math.sqrt(24), STATES, "4.89898 times what it should be, which is sqrt(d_model)"),
        (STATES / 8, STATES, "0.125 times what it should be, which is 1 / d_k"),
        (-STATES, STATES, "-1 times what it should be"),
        (STATES - BIAS, STATES, "a.bias is missing"),
        (STATES + BIAS, STATES, "a.bias is added once too often"),
        (STATES + 2.5, STATES, "the same vector is added at every position"),
        (HEADS[:, [2, 0, 1]], HEADS, "the heads are in the order [2, 0, 1]"),
        (HEADS[..., [1, 0, *range(2, 8)]], HEADS, "the last axis is permuted: 1, 0, 2, 3, 4, 5, 6, 7"),
        (STATES[:, ::-1], STATES, "the positions are in the order 6, 5, 4, 3, 2, 1, 0"),
        (HEADS.swapaxes(1, 2).reshape(HEADS.shape), HEADS, "the values are right, in other places"),
        (STATES.transpose(1, 0, 2), STATES, "the axes are in the order [1, 0, 2]: the values are right"),
        (STATES[:, :1], STATES, "the shape must be [4, 7, 24]: got [4, 1, 24]"),
        (spoilt(STATES, (1, 2)), STATES, "sentences 1 of 4 are wrong, and no others"),
        (spoilt(HEADS, np.s_[:, 1]), HEADS, "heads 1 of 3 are wrong, and no others"),
        (spoilt(STATES, np.s_[:, 1:, ::2]), STATES, "only the first position is right"),
        (spoilt(STATES, np.s_[:, :-1, ::2]), STATES, "only the last position is right"),
        (spoilt(STATES, np.s_[:, 3:5, 0]), STATES, "positions 3, 4 of 7 are wrong, and no others"),
        (spoilt(STATES, (2, 3, 4), math.nan), STATES, "1 of 672 values are NaN or infinite; sentences 2"),
        (STATES.astype(np.float32), STATES, "as if computed in float32"),
        (STATES.astype(np.float16), STATES, "as if computed in TensorFloat32 or float16"),
    ],
)
def test_what_an_error_looks_like(actual, wanted, said):
    found = signatures(np.asarray(actual, np.float64), wanted, CONFIG, {"a.bias": BIAS, "b.bias": BIAS[::-1]})
    assert any(said in words for words in found), found


def test_what_is_right_or_shapeless_has_no_signature():
    assert signatures(STATES, STATES, CONFIG) == []
    assert signatures(RNG.normal(size=STATES.shape), STATES, CONFIG) == []


def test_how_the_error_grows():
    layers = [f"layer {i}" for i in range(4)]
    assert "jumps at layer 2" in growth(list(zip(layers, [1e-15, 2e-15, 1e-3, 2e-3], strict=True)), 1e-12)
    assert "grows slowly" in growth(list(zip(layers, [1e-4, 2e-4, 3e-4, 4e-4], strict=True)), 1e-12)
    assert growth(list(zip(layers, [1e-15, 2e-15, 3e-15, 4e-15], strict=True)), 1e-12) == ""
    assert growth(list(zip(layers, [0.1, 0.2, 0.3, 0.4], strict=True)), 1e-12) == ""
    assert growth([("layer 0", math.inf), ("layer 1", 1.0)], 1e-12) == ""
