"""Marian itself agrees with imported models: the committed results, and two combinations if Marian is available."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
from conftest import MARIAN
from judges.marian import COMBINATIONS, SCORE, Combination, Judge, Marian, MarianError

REPORT = json.loads((Path(__file__).parents[1] / "docs" / "results" / "marian.json").read_text("utf-8"))
ROWS = {row["name"]: row for row in REPORT["combinations"]}
VERDICTS = {name: [row for row in ROWS.values() if row["verdict"] == name] for name in ("agrees", "decoder differs")}


def test_results_contain_every_combination():
    assert list(ROWS) == list(COMBINATIONS)
    for name, combination in COMBINATIONS.items():
        assert ROWS[name]["options"] == combination.shown


def test_at_least_14_combinations_agree_completely():
    assert len(VERDICTS["agrees"]) >= 14
    for row in VERDICTS["agrees"]:
        for result in row["backends"].values():
            assert result["score_error"] <= SCORE
            assert all(one["equal_lists"] == one["sentences"] > 0 for one in result["searches"])
    assert sum(len(row["backends"]) == 4 for row in VERDICTS["agrees"]) >= 3


def test_every_other_combination_has_a_known_reason():
    for name, row in ROWS.items():
        combination = COMBINATIONS[name]
        if combination.reason:
            assert row["verdict"] == "rejected"
            assert combination.reason in row["detail"]
        elif combination.learned:
            assert row["verdict"] == "not run"
        else:
            assert row["verdict"] == ("decoder differs" if combination.decoder else "agrees")


def test_pre_norm_decoder_is_reproduced():
    for row in VERDICTS["decoder differs"]:
        assert all(result["score_error"] <= SCORE for result in row["backends"].values())
        assert all(one["equal_lists"] == one["sentences"] for one in row["with_marians_decoder"])


def test_own_scores_of_marian_differ_only_with_pre_norm():
    for row in ROWS.values():
        if "own_difference" in row:
            assert (row["own_difference"] > 1e-3) == (row["decoder"] != ""), row["name"]


def test_width_of_the_batch_explains_different_translations():
    found = REPORT["batches"]
    assert found["ours_and_single"] == found["widest_and_batched"] == found["sentences"]
    assert found["single_and_batched"] == found["ours_and_batched"] < found["sentences"]


def test_gradients_differ_only_because_of_the_backward_pass_of_layer_norm():
    for one in REPORT["training"]["gradients"]:
        is_right = one["scales"] == "equal" or one["backward"] == "Marian's"
        assert one["error"] <= 2e-6 if is_right else one["error"] > 1e-3


def test_steps_of_adam_agree():
    for one in REPORT["training"]["steps"]:
        if one["backward"] == "Marian's":
            assert max(one["errors"]) <= 2e-5
        elif one["scales"] == "equal":
            assert one["errors"][0] <= 2e-5  # afterwards, the scales differ


def test_missing_pymarian_is_reported_with_the_command_that_installs_it(monkeypatch):
    with pytest.raises(MarianError, match="must name a Python interpreter: got /nowhere"):
        Marian("/nowhere/python")
    monkeypatch.setattr(Marian, "_call", lambda self, *arguments: "")
    assert Marian(sys.executable).version == ""


@pytest.mark.extended("Marian")
@pytest.mark.needs(bool(os.environ.get(MARIAN)), "Marian")
@pytest.mark.parametrize("name", ["defaults, all embeddings tied", "pre-norm with final norm"])
def test_imported_model_agrees_with_marian(name, tmp_path):
    judge = Judge(Marian(os.environ[MARIAN]), tmp_path, sentences=8, updates=30)
    chosen = COMBINATIONS[name]
    row = judge.compare(name, Combination(chosen.options, chosen.vocabulary, decoder=chosen.decoder))
    assert row["verdict"] == ROWS[name]["verdict"], row


def test_pages_show_the_numbers_of_the_results():
    docs, agreeing = Path(__file__).parents[1] / "docs", len(VERDICTS["agrees"])
    formats, rules, page = (
        " ".join((docs / name).read_text("utf-8").split())
        for name in ("reference/checkpoint-formats.md", "reference/search-rules.md", "results/marian.md")
    )
    number = agreeing + len(VERDICTS["decoder differs"])
    assert f"In all {number} combinations" in formats
    assert f"In {agreeing} of them, all translations agree" in formats
    different = REPORT["batches"]["sentences"] - REPORT["batches"]["single_and_batched"]
    assert f"Marian translates {different} of {REPORT['batches']['sentences']} sentences differently" in rules
    largest = {
        verdict: max(row["own_difference"] for row in rows if "own_difference" in row)
        for verdict, rows in VERDICTS.items()
    }
    assert f"the two scores of a translation differ by up to {largest['decoder differs']:.0%}" in page
    assert f"they differ by at most {math.ceil(1e6 * largest['agrees']) / 1e4:g}%" in page
