"""Typical patterns of errors, recognized from two tensors."""

import math

import numpy as np
import pytest

from transformer_parity.engine.signatures import narrowed
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.diagnose.evidence.signatures import places, signatures

CONFIG = tiny()  # d_model 24, three heads, d_k 8, d_v 10
RNG = np.random.default_rng(0)
STATES = RNG.normal(size=(4, 7, 24))
HEADS = RNG.normal(size=(4, 3, 7, 8))
BIAS = RNG.normal(size=24).astype(np.float32)
ALLOWED = np.broadcast_to(np.tri(7, dtype=bool), (4, 3, 7, 7))


def softmax(heads, mask=True):
    scores = np.where(mask, heads @ heads.mT, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def spoilt(array, where, by=1.0):
    changed = array.copy()
    changed[where] += by
    return changed


@pytest.mark.parametrize(
    ("actual", "wanted", "said"),
    [
        (STATES * math.sqrt(24), STATES, "4.89898 times the correct ones, a factor of sqrt(d_model)"),
        (STATES / 8, STATES, "0.125 times the correct ones, a factor of 1 / d_k"),
        (-STATES, STATES, "-1 times the correct ones"),
        (STATES - BIAS, STATES, "a.bias is missing"),
        (STATES + BIAS, STATES, "a.bias is added one time too many"),
        (STATES + 2.5, STATES, "the same vector is added at every position"),
        (HEADS[:, [2, 0, 1]], HEADS, "the heads are in the order [2, 0, 1]"),
        (HEADS[..., [1, 0, *range(2, 8)]], HEADS, "the last axis is permuted: 1, 0, 2, 3, 4, 5, 6, 7"),
        (STATES[:, ::-1], STATES, "the positions are in the order 6, 5, 4, 3, 2, 1, 0"),
        (HEADS.swapaxes(1, 2).reshape(HEADS.shape), HEADS, "the values are correct, but in different places"),
        (STATES.transpose(1, 0, 2), STATES, "the values are correct, but the axes are in the order [1, 0, 2]"),
        (STATES[:, :1], STATES, "the shape must be [4, 7, 24]: got [4, 1, 24]"),
        (spoilt(STATES, (2, 3, 4), math.nan), STATES, "1 of 672 values are NaN or infinite"),
        (np.zeros_like(STATES), STATES, "all values are zero"),
        (STATES.astype(np.float32), STATES, "every value has only float32 precision"),
        (STATES.astype(np.float16), STATES, "every value has only float16 precision"),
        (np.where(ALLOWED, HEADS @ HEADS.mT, -1e9), HEADS @ HEADS.mT, "values are -1e+09, as if they were masked"),
        (np.where(ALLOWED, HEADS @ HEADS.mT, -np.inf), HEADS @ HEADS.mT, "values are -inf, as if they were masked"),
        (softmax(HEADS), softmax(HEADS, ALLOWED), "252 keys that the mask forbids get nonzero weight"),
        (softmax(HEADS, ALLOWED), softmax(HEADS), "252 keys that the mask allows get zero weight"),
    ],
)
def test_error_signature_is_described(actual, wanted, said):
    actual = np.asarray(actual, np.float64)
    found = [narrowed(actual, wanted), *signatures(actual, wanted, CONFIG, {"a.bias": BIAS, "b.bias": BIAS[::-1]})]
    assert any(said in words for words in found), found


@pytest.mark.parametrize(
    ("actual", "wanted", "where"),
    [
        (
            spoilt(STATES, (1, 2)),
            STATES,
            ["among sentences 0 to 3, only 1 differs", "among positions 0 to 6, only 2 differs"],
        ),
        (spoilt(HEADS, np.s_[:, 1]), HEADS, ["among heads 0 to 2, only 1 differs"]),
        (spoilt(STATES, np.s_[:, 1:, ::2]), STATES, ["among positions 0 to 6, only 1, 2, 3, 4, 5, 6 differ"]),
        (spoilt(STATES, np.s_[[0, 1, 3]]), STATES, ["among sentences 0 to 3, only 0, 1, 3 differ"]),
        (spoilt(STATES, np.s_[:, :, 0]), STATES, []),
        (STATES[:, :1], STATES, []),
    ],
)
def test_wrong_positions_are_stated_without_a_cause(actual, wanted, where):
    assert places(actual, wanted) == where


@pytest.mark.parametrize(
    ("actual", "wanted"),
    [
        (STATES * (1.0 + 1e-7 * RNG.normal(size=STATES.shape)), STATES),  # as small as float32 rounding errors
        (STATES * (1.0 + 1e-3 * RNG.normal(size=STATES.shape)), STATES),  # as small as TensorFloat32 rounding errors
        (STATES[:1, :1, :1] * 3.0, STATES[:1, :1, :1]),  # a single number is always a multiple of another
        (STATES[:1, :1] + 1.0, STATES[:1, :1]),  # a single row is always another row plus a vector
        (np.round(STATES * 1.1), np.round(STATES)),  # the factor is lost by rounding
        (softmax(HEADS * 2.0, ALLOWED), softmax(HEADS, ALLOWED)),  # different weights, same mask
        (spoilt(STATES, np.s_[[0, 1, 3]], RNG.normal(size=(3, 7, 24))), STATES),  # all except the shortest sentence
        (spoilt(STATES, np.s_[:, 1:], RNG.normal(size=(4, 6, 24))), STATES),  # all except the first position
    ],
)
def test_no_signature_is_reported_without_evidence(actual, wanted):
    assert signatures(actual, wanted, CONFIG) == []


def test_factor_with_equal_sizes_lists_all_candidates():
    (found,) = signatures(STATES / math.sqrt(8), STATES, tiny(d_v=8))
    assert found.endswith("a factor of 1 / sqrt(d_k) or 1 / sqrt(d_v)")


def test_correct_and_unrelated_tensors_have_no_signature():
    assert signatures(STATES, STATES, CONFIG) == []
    assert signatures(RNG.normal(size=STATES.shape), STATES, CONFIG) == []


def test_wrongly_masked_keys_are_described_by_their_distance():
    own = softmax(HEADS, ALLOWED & ~np.eye(7, dtype=bool) | (np.arange(7) == 0))
    (said,) = [words for words in signatures(own, softmax(HEADS, ALLOWED), CONFIG) if "allows" in words]
    assert said == "72 keys that the mask allows get zero weight: each of these keys is at the position of its query"
    ahead = softmax(HEADS, ALLOWED | np.eye(7, k=1, dtype=bool))
    (said,) = [words for words in signatures(ahead, softmax(HEADS, ALLOWED), CONFIG) if "forbids" in words]
    assert said.endswith(": each is 1 position after its query")


def test_small_error_elsewhere_prevents_a_statement_about_positions():
    actual = spoilt(spoilt(STATES, np.s_[1], 1e-7), np.s_[2], 1e-10)  # sentence 2 is wrong too
    assert not any("sentences" in where for where in places(actual, STATES))
    assert places(spoilt(STATES, np.s_[1], 1e-7), STATES) == ["among sentences 0 to 3, only 1 differs"]
