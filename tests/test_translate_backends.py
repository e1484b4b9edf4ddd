"""`parity translate` with multiple backends: agreement, divergence, and near-ties."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import tiers
from test_decoding import twins
from translate_runs import model as model  # a fixture
from translate_runs import one_by_one, random_lines, save, translated
from translate_runs import short as short  # a fixture

from transformer_parity.apps.translate.agreement import TranslationComparison
from transformer_parity.apps.translate.lines import Line, TranslatedLine
from transformer_parity.transformer.decoding.near_ties import Doubt
from transformer_parity.transformer.ports.registry import PORTS

# --- Multiple backends ---


BOTH = pytest.mark.parametrize("asked", tiers.first_alone([[], ["--beam", 3]], "translations"), ids=["greedy", "beam"])


@BOTH
def test_backends_agree(asked, model, capfd, backends):
    names = ",".join(backend.name for backend in backends)
    lines = [*random_lines(19, seed=5), ""]
    code, report, said = translated(capfd, model, lines, "--compare", "--backends", names, *asked)
    assert (code, said) == (0, "")
    (verdict,) = report
    counted = "in float64, 19 lines: 19 same, 0 near-ties, 0 divergences; "
    assert verdict.startswith(f"AGREE  {names.replace(',', ', ')} {counted}")


@pytest.mark.parametrize(("asked", "bug"), [((), {"max_length": 2}), (("--beam", 3), {"length_penalty": 6.0})])
@pytest.mark.extended("translations", "jax", "tf")
def test_diverging_backend_is_reported(asked, bug, model, capfd, monkeypatch, port):
    right = PORTS[port.name].loaded.search

    def wrong(self, source_ids, options, on_step=None):
        return right(self, source_ids, replace(options, **bug), on_step)

    monkeypatch.setattr(PORTS[port.name].loaded, "search", wrong)
    lines = random_lines(12, seed=6)
    options = ("--compare", "--backends", f"numpy,{port.name}", *asked)
    beam = {"beam_size": 3} if asked else {}
    expected, buggy = one_by_one(model, lines, **beam), one_by_one(model, lines, **{**beam, **bug})
    code, report, _ = translated(capfd, model, lines, *options)
    assert code == 1
    differ = [number for number, line in enumerate(lines, 1) if expected[number - 1] != buggy[number - 1]]
    assert len(differ) > 2
    for number in differ:
        at = report.index(f"line {number}: divergence")
        texts = {"source": lines[number - 1], "numpy": expected[number - 1], port.name: buggy[number - 1]}
        assert report[at + 1 : at + 4] == [f"  {who:6}  {text}" for who, text in texts.items()]
        assert report[at + 4].startswith(f"  {port.name} in sentence {number}")
    assert report[-1].startswith(f"DIVERGE  numpy, {port.name} in float64, 12 lines: ")
    code, report, _ = translated(capfd, model, lines, *options, "--json")
    assert code == 1
    *found, verdict = map(json.loads, report)
    assert (verdict["verdict"], verdict["result"]["divergence"]) == ("DIVERGE", len(found))
    assert {answer["verdict"] for answer in found} == {"divergence"}
    assert {doubt["backend"] for answer in found for doubt in answer["doubts"]} == {port.name}


@pytest.mark.extended("translations", "jax", "tf")
def test_near_tie_is_not_a_divergence(tmp_path, capfd, monkeypatch, port):
    """Tokens 5 and 7 differ in log-probability by only 1e-9, which float32 can't represent."""
    model = save(tmp_path / "model.safetensors", *twins(1e-9))
    search = PORTS[port.name].loaded.search

    def compare(dtype, instead):
        """Compare the reference with a port that generates one of the two tokens instead of the other."""

        def swap(ids):
            return np.where(ids == 12 - instead, instead, ids)

        def other(self, source_ids, options, on_step=None):
            result = search(self, source_ids, options, on_step and (lambda ids: on_step(swap(ids))))
            return replace(result, nbest_ids=swap(result.nbest_ids))

        monkeypatch.setattr(PORTS[port.name].loaded, "search", other)
        options = ("--compare", "--backends", f"numpy,{port.name}", "--dtype", dtype)
        return translated(capfd, model, random_lines(9, seed=7), *options)

    code, report, _ = compare("float32", instead=7)
    assert code == 0, report
    assert report[0].endswith(": near-tie")
    doubt = r"ID 5 instead of 7, margin 1\.0e-09, rounding noise \d"
    line = report[0].removeprefix("line ").partition(":")[0]
    assert re.match(rf"  numpy in \d near-ties?; sentence {line}, token \d+: {doubt}", report[4])
    assert report[-1].startswith(f"AGREE  numpy, {port.name} in float32, 9 lines: ")
    assert " 0 near-ties, 0 divergences" not in report[-1]
    code, report, _ = compare("float64", instead=5)  # rounding errors are smaller in float64
    assert code == 1
    assert report[0].endswith(": divergence")


def test_difference_unexplained_by_near_ties_is_a_divergence():
    line = Line(1, "a", (3, 2), None)
    said = {name: TranslatedLine(name, -1.0, (len(name), 2), (name, "</s>")) for name in ("numpy", "jax")}
    near, wrong = Doubt(1, 1, 1e-7, 1e-6, "near"), Doubt(1, 1, 1e-5, 1e-6, "wrong")
    assert TranslationComparison(line, said, {"numpy": [], "jax": [near]}).verdict == "near-tie"
    for doubts in ([wrong], [near, wrong], []):  # these doubts don't explain the difference
        assert TranslationComparison(line, said, {"numpy": [], "jax": doubts}).verdict == "divergence"
    assert TranslationComparison(line, {}, {}).verdict == "same"


@pytest.mark.extended("translations", "jax", "tf")
def test_uncompared_lines_do_not_count_as_agreement(model, short, capfd, port):
    options = ("--compare", "--backends", f"numpy,{port.name}")
    code, report, _ = translated(capfd, model, ["", " "], *options)
    assert code == 3
    assert report[0].startswith("INCOMPLETE")
    code, report, said = translated(capfd, short, ["a", "abcdefg"], *options)
    assert code == 3
    assert report[0].startswith(f"INCOMPLETE  numpy, {port.name} in float64, 1 line: 1 same, ")
    assert ", 1 too long; " in report[0]
    assert "the translation of line 2 is empty" in said
