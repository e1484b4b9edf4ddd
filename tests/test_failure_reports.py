"""Printed reports of failures: the code in them runs, and the advice in them can be followed."""

from __future__ import annotations

import io
import json
import math
import re
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_investigate import CASE, blamed, inject, named, numpy

from transformer_parity.cli.main import main
from transformer_parity.engine.findings import DIVERGES, ROUND_TRIP, Finding
from transformer_parity.engine.report.tables import print_problems
from transformer_parity.engine.verdict import Verdict
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.for_ports import model_cases
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.decoding.near_ties import Doubt
from transformer_parity.transformer.diagnose import reproduce
from transformer_parity.transformer.diagnose.diagnosis import EXACT, Diagnosis, diagnose
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.diagnose.statements import IN_PORT, if_it_is_meant
from transformer_parity.transformer.ports import templates
from transformer_parity.transformer.ports.templates.other_port import MyPort
from transformer_parity.transformer.report.diagnoses import print_failure_report, print_undiagnosed


def printed(report, **options):
    console = Console(file=io.StringIO(), **options)
    print_failure_report(console, report)
    return console.file.getvalue()


@pytest.mark.parametrize("options", [{"width": 60}, {"width": 60, "force_terminal": True}])
def test_reproduction_code_can_be_copied_from_a_narrow_terminal(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evidence = blamed(CASE, inject(named("scores divided by d_k")))
    directory = reproduce.save(evidence, CASE, "numpy", tmp_path / "a-directory-with-a-long-name" / "failures")
    report = FailureReport("it", "float64", CASE.name, CASE.stage, None, Diagnosis("so", "likely"), directory=directory)
    text = printed(report, **options)
    code = text.partition("To rerun only this block:")[2].partition("\n")[2]
    assert "\x1b" not in code  # no colors, because they may be unreadable in a light terminal
    said = io.StringIO()
    with redirect_stdout(said):
        exec(code, {})
    error = re.search(r"scores: error (\S+), was ", said.getvalue())
    assert float(error[1]) < 1e-15


def test_convention_diagnosis_suggests_an_override():
    case = model_cases(tiny(d_v=8))[0]
    other = replace(case, config=case.config.replace(layer_norm_epsilon=1e-5))
    found = if_it_is_meant(diagnose(case, tensors(numpy(other), case), "it"), IN_PORT)
    assert found.confidence == EXACT
    advice = "fix the port or, if this change is intentional, declare it: overrides = {'layer_norm_epsilon': 1e-05}"
    assert advice in found.signatures
    assert len(found.sentence) < 120
    assert found.runner_up not in found.sentence


def test_bug_diagnosis_suggests_no_override():
    assert diagnose(CASE, tensors(inject(named("scores divided by d_k")), CASE), "it").signatures == ()


def test_uninformative_numbers_are_omitted():
    far = Finding("it", "float64", "full model", "full/padded", "fast", "tokens", 0.5, 1e-12, DIVERGES)
    assert far.words == "error 5.0e-01, tolerance 1.0e-12"
    assert replace(far, error=3e-12).words == "error 3.0e-12, 3 times the tolerance of 1.0e-12"
    assert str(Doubt(1, 2, math.inf, 0.0, "it ends")) == "sentence 1, token 2: it ends"
    failed = replace(far, verdict="failed", detail="ValueError: no")
    console = Console(file=io.StringIO(), width=200)
    print_problems(console, [failed, replace(failed, case="full/one_token")], Verdict(DIVERGES))
    assert "full/padded tokens: ValueError: no (and in 1 other case)" in console.file.getvalue()


def test_stages_blocked_by_wrong_activations_are_listed():
    report = FailureReport("it", "float64", CASE.name, CASE.stage, None, Diagnosis("so", "likely"))
    one = Finding("it", "float64", "full model", CASE.name, "taps", "output", 1.0, 1e-12, DIVERGES, stage="activations")
    findings = [one, replace(one, stage="decode"), replace(one, stage="steps"), replace(one, backend="other")]
    for reports, said in (
        ([report], "\nit also differs in steps, decode. Fix its activations first, then rerun to diagnose the rest.\n"),
        ([replace(report, stage="steps")], ""),
        ([], ""),
    ):
        console = Console(file=io.StringIO(), width=40)
        print_undiagnosed(console, findings, reports)
        assert console.file.getvalue() == said


def test_stages_that_differ_only_in_exported_weights_are_not_listed():
    """The exported weights are compared in every case, so they don't make a stage worth listing."""
    report = FailureReport("it", "float64", CASE.name, CASE.stage, None, Diagnosis("so", "likely"))
    back = Finding("it", "float64", "weights", CASE.name, "", ROUND_TRIP, 1.0, 0.0, DIVERGES, stage="activations")
    console = Console(file=io.StringIO(), width=200)
    print_undiagnosed(console, [back, replace(back, stage="decode")], [report])
    assert console.file.getvalue() == ""
    print_undiagnosed(console, [back, replace(back, stage="steps", tap="loss")], [report])
    said = "it also differs in steps. Fix its exported weights first, then rerun to diagnose the rest."
    assert console.file.getvalue().strip() == said


def test_invalid_option_prints_the_usage_of_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["golden", "--out", "x", "--stages", "decode"])
    assert ended.value.code == 3
    assert capsys.readouterr().err.startswith("usage: parity golden ")


class GreedyOnly(MyPort):
    """A port that raises an error if the caller requests a beam."""

    def generate(self, source_ids, max_length, beam_size, length_penalty):
        if beam_size > 1:
            raise NotImplementedError("only greedy search")
        return super().generate(source_ids, max_length, beam_size, length_penalty)


def test_unsupported_cases_are_omitted_from_golden_vectors(tmp_path, capsys):
    command = ["golden", "--port", f"{__name__}:GreedyOnly", "--dtype", "float64", "--stage", "activations,decode"]
    assert main([*command, "--out", str(tmp_path / "mine")]) == 0
    said = capsys.readouterr().out
    assert "omitted: float64 decode/port_beam: NotImplementedError: only greedy search" in said
    written = {
        entry["name"].split("/")[0] for entry in json.loads((tmp_path / "mine/manifest.json").read_text())["cases"]
    }
    assert written == {"full", "decode"}


def test_port_templates_import_only_from_the_plugin_module():
    for path in Path(templates.__path__[0]).glob("*_port.py"):
        text = path.read_text("utf-8")
        assert "from transformer_parity.plugin import " in text
        assert "transformer_parity.transformer.ports" not in text
        assert "transformer_spec.taps" not in text
        assert "transformer_spec.training_config" not in text
