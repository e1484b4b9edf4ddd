"""The result as a dict, and the reports made from it: JSON and its schema, the page, and the tree in a terminal."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import CASES, ENVIRONMENT, GUILTY, MACHINE, SETTING, SIMPLE, TAPS, ports_of, result_of, run_of
from report_runs import result as result  # a fixture
from result_schema import violations

from transformer_parity.engine.findings import FAILED, IMPRECISE, SKIPPED
from transformer_parity.engine.system.files import write_json
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.report.html import write_html
from transformer_parity.transformer.report.result import CheckResult, build


# The dict, the JSON file, and the schema
def test_result_fits_the_schema(result, tmp_path):
    write_json(tmp_path / "result.json", result)
    read = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert read == result  # the result contains only JSON types
    assert violations(read) == []
    assert violations(result_of([])) == []


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        (lambda result: result["result"].pop("taps"), ("$.result", "required")),
        (lambda result: result["result"].update(extra=1), ("$.result", "additionalProperties")),
        (lambda result: result["result"]["failures"][0].update(error="far"), ("$.result.failures[0].error", "anyOf")),
        (
            lambda result: result["result"]["blames"][0]["marks"][3].update(verdict="bad"),
            ("$.result.blames[0].marks[3].verdict", "enum"),
        ),
        (lambda result: result["result"]["fingerprint"].update(sha256="?"), ("$.result.fingerprint.sha256", "pattern")),
    ],
)
def test_schema_rejects_invalid_results(result, change, violation):
    broken = json.loads(json.dumps(result))
    change(broken)
    assert violations(broken) == [violation]


def test_result_counts_skips_separately(result):
    assert (result["verdict"], result["exit_code"]) == ("DIVERGE", 1)
    assert result["result"]["skipped"] == len(result["result"]["skips"]) == 1
    wrong = len(TAPS) - TAPS.index(GUILTY)
    assert len(result["result"]["failures"]) == 2 * wrong + 2 + 1  # full/padded in two dtypes, full/untied, gradients
    assert result["result"]["comparisons"] == 6 * len(TAPS) + 3
    assert {failure["error"] for failure in result["result"]["failures"]} == {0.25, "inf"}
    alone = result_of([replace(SIMPLE, verdict=SKIPPED)])
    assert (alone["verdict"], alone["result"]["comparisons"], alone["result"]["skipped"]) == ("INCOMPLETE", 0, 1)


def test_cases_have_their_stage_and_their_first_failure(result):
    rows = {(row["backend"], row["dtype"], row["case"]): row for row in result["result"]["cases"]}
    assert rows["torch", "float64", "full/padded"]["finding"]["tap"] == GUILTY
    assert rows["torch", "float32", "full/padded"]["verdict"] == IMPRECISE
    assert rows["jax", "float64", "gradients/padded"]["stage"] == "gradients"  # not the stage of the weight round trip
    assert rows["jax", "float64", "decode/beam"]["skips"] == ["no search"]


def test_result_contains_taps_of_the_main_case_and_failed_cases(result):
    order = [(row["backend"], row["dtype"], row["case"]) for row in result["result"]["taps"]]
    assert ("jax", "float64", "full/untied") in order  # included because the other port failed in this case
    assert [row["tap"] for row in result["result"]["taps"]][: len(TAPS)] == TAPS
    agreeing = result_of([*run_of("jax", "float64"), *run_of("jax", "float64", "full/untied")])
    assert {row["case"] for row in agreeing["result"]["taps"]} == {"full/padded"}
    preset = result_of(
        [replace(finding, component="presets", case="preset/t5") for finding in run_of("jax", "float64")]
    )
    assert {row["case"] for row in preset["result"]["taps"]} == {"preset/t5"}


def test_fingerprint_depends_only_on_the_inputs_of_a_check(tmp_path):
    def fingerprint(finding=SIMPLE, setting=SETTING, environment=ENVIRONMENT, cases=CASES, weights=None):
        common = {"reference": environment["numpy"], "machine": MACHINE, "cases": cases, "weights": weights}
        made = build(CheckResult(setting=setting, ports=ports_of([finding], environment), **common))
        return made["result"]["fingerprint"]["sha256"]

    usual = fingerprint()
    assert usual == fingerprint(replace(SIMPLE, error=0.0))  # results don't affect the fingerprint of the inputs
    (tmp_path / "one").write_bytes(b"1")
    (tmp_path / "two").write_bytes(b"2")
    other = {name: ids[::-1] for name, ids in CASES[0].inputs.items()}
    changed = [
        fingerprint(setting=replace(SETTING, precision="fast")),
        fingerprint(environment={**ENVIRONMENT, "torch": {"version": "2"}}),
        fingerprint(environment={**ENVIRONMENT, "torch": {**ENVIRONMENT["torch"], "threads": "2"}}),
        fingerprint(cases=[replace(CASES[0], config=tiny(d_ff=41)), *CASES[1:]]),
        fingerprint(cases=[replace(CASES[0], inputs=other), *CASES[1:]]),
        fingerprint(cases=[replace(CASES[0], seed=1), *CASES[1:]]),
        fingerprint(weights=tmp_path / "one"),
        fingerprint(weights=tmp_path / "two"),
    ]
    assert len({usual, *changed}) == 1 + len(changed)


@pytest.mark.parametrize(("place", "step"), [(Path, "write_text"), (os, "replace")], ids=["write", "replace"])
@pytest.mark.parametrize("write", [write_json, write_html])
def test_report_is_written_completely_or_not_at_all(write, place, step, result, tmp_path, monkeypatch):
    path = tmp_path / "report"
    write(path, result)
    old = path.read_bytes()

    def full(self, *args):
        open(self, "wb").close()  # like a write to a full disk
        raise OSError("no space left")

    monkeypatch.setattr(place, step, full)
    with pytest.raises(OSError, match="no space left"):
        write(path, result)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [write_html, write_json])
def test_report_replaces_text_that_utf_8_cannot_encode(write, tmp_path):
    write(tmp_path / "report", result_of([replace(SIMPLE, verdict=FAILED, detail="a \ud800 b")]))
    assert "a " in (tmp_path / "report").read_text("utf-8")
