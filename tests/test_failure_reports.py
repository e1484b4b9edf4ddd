"""How a failure is printed: what can be copied runs, what is said can be followed."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
from rich.console import Console
from test_investigate import CASE, blamed, named, numpy, plant

from transformer_parity.cases.case import tiny
from transformer_parity.cases.for_ports import model_cases
from transformer_parity.compare.findings import DIVERGES, Finding
from transformer_parity.compare.near_ties import Doubt
from transformer_parity.compare.outputs import tensors
from transformer_parity.compare.verdict import Verdict
from transformer_parity.diagnose import reproduce
from transformer_parity.diagnose.diagnosis import EXACT, Diagnosis, diagnose
from transformer_parity.diagnose.investigate import FailureReport
from transformer_parity.report.diagnoses import print_failure_report
from transformer_parity.report.tables import print_problems


def printed(report, **options):
    console = Console(file=io.StringIO(), **options)
    print_failure_report(console, report)
    return console.file.getvalue()


@pytest.mark.parametrize("options", [{"width": 60}, {"width": 60, "force_terminal": True}])
def test_the_lines_that_run_a_block_alone_can_be_copied_from_a_narrow_terminal(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evidence = blamed(CASE, plant(named("scores over d_k")))
    folder = reproduce.save(evidence, CASE, "numpy", tmp_path / "a-folder-with-a-long-name" / "failures")
    report = FailureReport("it", "float64", CASE.name, CASE.stage, None, Diagnosis("so", "likely"), folder=folder)
    text = printed(report, **options)
    code = text.partition("To run this block alone:")[2].partition("\n")[2]
    assert "\x1b" not in code  # no colour, which a light terminal may not show
    said = io.StringIO()
    with redirect_stdout(said):
        exec(code, {})
    assert "scores: error 0.0e+00, was " in said.getvalue()


def test_a_convention_says_how_to_declare_it():
    case = model_cases(tiny(d_v=8))[0]
    other = replace(case, config=case.config.replace(layer_norm_epsilon=1e-5))
    found = diagnose(case, tensors(numpy(other), case), "it")
    assert found.confidence == EXACT
    advice = "mend it; or if you mean it, declare it in the port: overrides = {'layer_norm_epsilon': 1e-05}"
    assert advice in found.signatures
    assert len(found.sentence) < 120
    assert found.runner_up not in found.sentence


def test_a_mistake_has_nothing_to_declare():
    assert diagnose(CASE, tensors(plant(named("scores over d_k")), CASE), "it").signatures == ()


def test_numbers_that_say_nothing_are_left_out():
    far = Finding("it", "float64", "full model", "full/padded", "fast", "tokens", 0.5, 1e-12, DIVERGES)
    assert far.words == "error 5.0e-01, for a tolerance of 1.0e-12"
    assert replace(far, error=3e-12).words == "error 3.0e-12, 3 times its tolerance of 1.0e-12"
    assert str(Doubt(1, 2, math.inf, 0.0, "it ends")) == "sentence 1, token 2: it ends"
    failed = replace(far, verdict="failed", detail="ValueError: no")
    console = Console(file=io.StringIO(), width=200)
    print_problems(console, [failed, replace(failed, case="full/one_token")], Verdict(DIVERGES))
    assert "full/padded tokens: ValueError: no (and in 1 other case)" in console.file.getvalue()
