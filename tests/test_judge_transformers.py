"""The Flax and TensorFlow classes of transformers 4.57 agree with imported models: the committed results, and a rerun.

The rerun requires an environment with transformers 4.57.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import TRANSFORMERS_4
from judges import transformers as judge
from judges import transformers_models
from judges.transformers import MODELS, JudgeError, compare_all, run_judge, score_error, verdict
from judges.transformers_models import CUT, OF_ALL, SEARCHES, SENTENCES, ended, variety

from transformer_parity.apps.checkpoints.importer import import_checkpoint

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import transformers_results  # noqa: E402  a module of the site

REPORT = json.loads((DOCS / "results" / "transformers.json").read_text("utf-8"))
ROWS = {row["name"]: row for row in REPORT["models"]}


def test_results_contain_every_model():
    assert list(ROWS) == list(MODELS)
    for name, model in MODELS.items():
        assert (ROWS[name]["title"], ROWS[name]["fields"]) == (model.title, model.shown)
        assert set(ROWS[name]["torch"]) >= {"flax float64", "flax float32"}
        assert ("tf float32" in ROWS[name]["torch"]) == ("tf" in model.judges)


def test_all_models_agree():
    assert {name for name, row in ROWS.items() if row["verdict"] != "agrees"} == set()
    assert {row["title"] for row in ROWS.values()} == {"Marian", "Bart", "MBart", "Pegasus", "Blenderbot", "T5", "MT5"}


@pytest.mark.parametrize("name", ["t5", "t5 v1.1", "mt5"])
def test_only_tied_t5_models_share_the_output_matrix_and_scale_their_logits(name, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_models, "SEEDS", 1)
    transformers_models.write(MODELS[name], tmp_path)
    config = import_checkpoint(tmp_path).config
    assert (config.ties_output, config.scale_logits) == (MODELS[name].is_tied,) * 2


def test_logits_are_within_the_tolerances():
    for row in ROWS.values():
        assert verdict(row) == "agrees"
        assert row["allowed"]["float64"] <= (1.5e-5 if MODELS[row["name"]].is_t5 else 1e-12)
        assert row["allowed"]["float32"] <= 1e-4
        assert set(row["backends"]) == {"numpy", "torch", "jax", "tf"}


def test_translations_are_equal_and_varied():
    for row in ROWS.values():
        chosen = MODELS[row["name"]]
        assert [(one["judge"], one["name"]) for one in row["searches"]] == [
            (name, search)
            for name in sorted(chosen.judges, reverse=True)
            for search in chosen.searches
            if (name, SEARCHES[search].get("early_stopping")) != ("tf", "never")
        ]
        for one in row["searches"]:
            assert one["sentences"] == SENTENCES
            assert one["distinct"] >= (8 if one["name"] in OF_ALL else 3)
            for backend in ("numpy", "torch"):
                assert one["equal"][backend] == SENTENCES - one["cut"]
            assert one["cut"] == 0 or one["name"] == CUT
        assert all(set(one["equal"]) >= {"jax", "tf"} for one in row["searches"][:2])


def test_flax_differs_without_the_condition_of_pytorch():
    searches = [one for row in ROWS.values() for one in row["searches"] if one["judge"] == "flax" and "original" in one]
    assert {one["name"] for one in searches} == set(SEARCHES)
    for one in searches:
        if one["name"] == "greedy":
            assert one["original"] == one["sentences"]
    assert sum(one["original"] < one["equal"]["numpy"] for one in searches) >= 3


def test_missing_environment_is_reported_with_the_command_that_installs_it(tmp_path):
    with pytest.raises(JudgeError, match="must name a Python interpreter: got /nowhere/python"):
        run_judge("/nowhere/python", "flax", "float32", [])
    (tmp_path / "transformers.py").write_text("raise ImportError('no Flax classes')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(JudgeError, match=r"no Flax classes; create .*pip install transformers==4\.57\.6 jax=="):
            run_judge(sys.executable, "flax", "float32", [])


def test_translations_are_compared_up_to_eos():
    assert ended([[5, 2, 0], [5, 2, 2], [5, 6, 7], [2, 0, 0]], 2) == [[5, 2], [5, 2], [5, 6, 7], [2]]
    assert variety([[5, 2], [5, 2], [5, 6, 2], [2]]) == 9
    assert judge.same([[1], [2]], [[1], [3]]) == 1


def test_scores_are_compared_only_for_equal_translations():
    ours, theirs = np.array([-2.0, -1.0]), np.array([-2.2, -9.0])
    assert score_error([[1], [2]], [[1], [3]], ours, theirs) == pytest.approx(0.1)
    assert score_error([[1], [2]], [[4], [3]], ours, theirs) is None
    assert score_error([[1], [2]], [[1], [3]], ours, np.full(2, np.nan)) is None


def agreeing_row(**changes):
    search = {"sentences": 80, "equal": {"numpy": 80}, "cut": 0, "score_error": 1e-7}
    row = {
        "allowed": {"float64": 1e-12, "float32": 2e-6},
        "judges": {"flax float64": 1e-15, "tf float32": 1e-6},
        "backends": {"numpy": 1e-6},
        "torch": {"flax float64": 1e-6},
        "searches": [search],
    }
    return {**row, **{name: value for name, value in changes.items() if name in row}} | {
        "searches": [{**search, **changes.get("search", {})}]
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "agrees"),
        ({"judges": {"flax float64": 2e-12}}, "differs"),
        ({"judges": {"tf float32": 3e-6}}, "differs"),
        ({"backends": {"torch": 3e-6}}, "differs"),
        ({"torch": {"flax float64": 3e-6}}, "differs"),
        ({"search": {"equal": {"numpy": 80, "jax": 79}}}, "differs"),
        ({"search": {"equal": {"numpy": 79}, "cut": 1}}, "agrees"),
        ({"search": {"score_error": 2e-5}}, "differs"),
    ],
)
def test_verdict_depends_on_logits_translations_and_scores(changes, expected):
    assert verdict(agreeing_row(**changes)) == expected


@pytest.mark.extended("transformers 4")
@pytest.mark.needs(bool(os.environ.get(TRANSFORMERS_4)), "transformers 4")
@pytest.mark.parametrize("name", ["marian", "mbart", "t5 v1.1"])
def test_imported_model_agrees_with_flax_and_tensorflow_classes(name, tmp_path):
    (row,) = compare_all(os.environ[TRANSFORMERS_4], [name], tmp_path)
    assert row["verdict"] == ROWS[name]["verdict"], row


def test_pages_show_the_numbers_of_the_results():
    formats, page = (
        " ".join((DOCS / name).read_text("utf-8").split())
        for name in ("reference/checkpoint-formats.md", "results/transformers.md")
    )
    assert f"in all {len(ROWS)} models" in formats
    versions = {name: REPORT["versions"][name] for name in ("transformers", "jax", "flax", "tensorflow", "tf-keras")}
    for command in (page, judge.INSTALL):
        assert all(f"{name}=={number}" in command for name, number in versions.items())


def test_tables_show_the_numbers_of_the_results():
    parts = {part: list(transformers_results.transformers(part)) for part in transformers_results.PARTS}
    searches = [one for row in ROWS.values() for one in row["searches"]]
    equal, total = sum(one["equal"]["numpy"] for one in searches), sum(one["sentences"] for one in searches)
    assert f"{len(ROWS)} of {len(ROWS)} models agree" in parts["summary"][0]
    assert "e-15 in float64 (Flax without T5)" in parts["summary"][0]
    assert f"{equal:,} of {total:,} translations are equal" in parts["summary"][0]
    assert "transformers 4.57" in parts["summary"][-1]
    assert len(parts["models"]) == 2 + len(ROWS)
    for line, row in zip(parts["models"][2:], ROWS.values(), strict=True):
        assert all(f"{error:.1e}" in line for error in row["judges"].values())
        assert ("not supported" in line) == (len(row["judges"]) == 2)
    cells = [line.split(" | ") for line in parts["searches"][2:]]
    assert sum(int(cell[4].split(" of ")[0]) for cell in cells) == equal
