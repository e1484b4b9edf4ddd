"""Causes that ``parity pair`` finds with experiments: changed weights, smaller inputs, and decoding without a cache."""

from __future__ import annotations

import time

import numpy as np
import pair_models
import pytest

from transformer_parity.pairs.check import compare_pair
from transformer_parity.pairs.contract.source import Source
from transformer_parity.pairs.diagnose.recognize import places, recognize
from transformer_parity.pairs.diagnose.trials import WrongTensor, weight_trials
from transformer_parity.pairs.result import Settings
from transformer_parity.pairs.run.messages import Import

RNG = np.random.default_rng(0)
WEIGHTS = {
    "conv": RNG.normal(size=(5, 2, 3, 4)),
    **{f"gates.{i}": RNG.normal(size=(8, 24)) for i in range(3)},
    "flat": RNG.normal(size=(24, 6)),
}
X = RNG.normal(size=(7, 24))


def model(weights):
    """Return a tensor that depends on all weights."""
    gates = [np.tanh(X @ weights[f"gates.{i}"].T) for i in range(3)]
    return np.concatenate(
        [gates[0] * gates[1] + gates[2], X @ weights["flat"], X @ weights["conv"].reshape(5, 24).T], 1
    )


def reordered(weights):
    changed = {f"gates.{i}": np.concatenate([weights[f"gates.{i}"][j : j + 2] for j in (0, 4, 2, 6)]) for i in range(3)}
    return {**weights, **changed}


REPAIRS = {
    "each of gates.0, gates.1, gates.2 has its quarters in the order 0, 2, 1, 3": reordered,
    "conv is flattened in the order of the axes": lambda w: {
        **w,
        "conv": w["conv"].transpose(0, 2, 3, 1).reshape(w["conv"].shape),
    },
    "flat has axis 0 flattened from": lambda w: {
        **w,
        "flat": w["flat"].reshape(4, 6, 6).swapaxes(0, 1).reshape(24, 6),
    },
}


@pytest.mark.parametrize("said", REPAIRS)
def test_weights_that_a_port_misreads_are_named(said):
    subject = WrongTensor("y", WEIGHTS, WEIGHTS, model, lambda weights: model(REPAIRS[said](weights)), 1e-9)
    (found,) = weight_trials(subject, time.monotonic() + 60.0, repairs=True)
    assert found.sentence.startswith(said)


def test_weights_are_not_changed_if_the_cause_is_known():
    subject = WrongTensor("y", WEIGHTS, WEIGHTS, model, lambda weights: model(reordered(weights)), 1e-9)
    assert list(weight_trials(subject, time.monotonic() + 60.0, repairs=False)) == []


def test_small_errors_are_not_repaired_by_any_change():
    noise = 1.0 + 1e-6 * RNG.normal(size=model(WEIGHTS).shape)
    subject = WrongTensor("y", WEIGHTS, WEIGHTS, model, lambda weights: model(weights) * noise, 1e-5)
    assert list(weight_trials(subject, time.monotonic() + 60.0, repairs=True)) == []


def causes(name, **settings):
    places = [Source(pair_models.__file__.rpartition("/")[0], "pair_models", each) for each in ("Hidden", name)]
    return compare_pair(Import(places[0]), Import(places[1]), Settings(seeds=1, **settings), {})


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_epsilon_of_a_norm_without_taps_is_named(dtype):
    (found,) = causes("HiddenEpsilon", stages=("forward",), dtypes=(dtype,)).named
    assert found.kind == "epsilon"
    assert found.sentence.endswith("quadruples the error, which is typical of a different epsilon in a norm")


def test_other_differences_do_not_look_like_epsilon():
    assert "epsilon" not in [found.kind for found in causes("HiddenSlope", stages=("forward",)).named]


def test_cache_that_changes_the_logits_is_named():
    result = causes("HiddenCache")
    assert (result.verdict.word, result.introduced) == ("DIVERGE", ["next_logits_cached[2]"])
    assert [found.kind for found in result.named] == ["cache"]
    assert "the port's logits of step 2 differ from its own logits without a cache" in result.named[0].sentence


def test_rows_that_are_right_are_not_reported():
    table = RNG.normal(size=(50, 12))
    wanted = table[RNG.integers(0, 50, 200)]
    actual = wanted.copy()
    actual[-1] = RNG.normal(size=12)  # not a row of the table
    assert not [found for found in recognize(actual, wanted, {}, {"table": table}, 1e-9) if "row" in found.sentence]


def test_invalid_tensors_are_not_recognized():
    x = np.random.default_rng(0).normal(size=(4, 9))
    assert recognize(np.full_like(x, np.nan), x, {"x": x}, {}, 1e-9) == []
    assert recognize(x[:, :8], x, {"x": x}, {}, 1e-9) == []
    assert recognize(x[:1, :3] * 2.0, x[:1, :3], {}, {}, 1e-9) == []


def test_places_are_indices_of_axes():
    x = np.random.default_rng(0).normal(size=(2, 5, 9))
    mine = x.copy()
    mine[1, 2:4] += 1.0
    assert places(mine, x) == [
        "among indices 0 to 1 of axis 0, only 1 differs",
        "among indices 0 to 4 of axis 1, only 2, 3 differ",
    ]
