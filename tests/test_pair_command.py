"""Options of ``parity pair`` and ``parity compare`` that have no effect together are errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from transformer_parity.cli.main import main

MODELS = str(Path(__file__).with_name("pair_models.py"))


@pytest.mark.parametrize("options", ["--json r.json", "--html r.html", "--stage forward", "--dtype float32", "x.py"])
def test_out_rejects_options_of_a_comparison(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    assert main(["pair", MODELS, *options.split(), "--out", "truth"]) == 3
    assert "--out compares nothing, so it can't be combined with" in capsys.readouterr().err
    assert not (tmp_path / "truth").exists()


def test_names_of_golden_vectors_are_rejected(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path), "--names", str(tmp_path / "names.toml")]) == 3
    assert "whose names are fixed; remove --names" in capsys.readouterr().err


def test_files_of_a_pair_can_be_compared(tmp_path, capsys):
    assert main(["pair", MODELS, "--out", str(tmp_path / "truth"), "--seeds", "1"]) == 0
    assert main(["compare", str(tmp_path / "truth"), str(tmp_path), "--stage", "activations"]) == 3
    assert "which has no stages; remove --stage" in capsys.readouterr().err


@pytest.mark.parametrize(("float64_too", "code"), [(True, 0), (False, 3)])
def test_float32_tolerance_of_files_is_larger_if_float64_agrees(float64_too, code, tmp_path, capsys):
    truth, mine = tmp_path / "truth", tmp_path / "mine"
    assert main(["pair", MODELS, "--out", str(truth), "--seeds", "1"]) == 0
    expected = load_file(truth / "0" / "expected.safetensors")
    allowed = json.loads((truth / "manifest.json").read_text())["tolerances"]["float32"]["output logits"]
    (mine / "0").mkdir(parents=True)
    (mine / "manifest.json").write_text(json.dumps({"kind": "pair", "format": 1, "producer": "mine"}))
    if float64_too:
        save_file({name: value * (1 + 1e-15) for name, value in expected.items()}, mine / "0" / "float64.safetensors")
    wrong = expected["output logits"] * (1 + 3 * allowed)
    found = {name: value.astype(np.float32) for name, value in (expected | {"output logits": wrong}).items()}
    save_file(found, mine / "0" / "float32.safetensors")
    assert main(["compare", str(truth), str(mine)]) == code, capsys.readouterr().out


def test_every_output_file_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = ["--json", "r.json", "--html", "r.html", "--write-names", "names.toml"]
    assert main(["pair", f"{MODELS}:Original", f"{MODELS}:Epsilon", "--seeds", "1", *files]) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "r.html", "names.toml"}


def test_reason_of_a_failure_is_printed_once(capsys):
    assert main(["pair", f"{MODELS}:Original", f"{MODELS}:RaisesInLoad", "--seeds", "1"]) == 3
    printed = capsys.readouterr().out
    assert printed.count("KeyError: 'missing'") == 1
    assert "MISSING   pair_models:RaisesInLoad: forward in float32: nothing was compared\n" in printed


def test_difference_in_several_dtypes_is_printed_once(capsys):
    assert main(["pair", f"{MODELS}:Original", f"{MODELS}:HeadTwiceAsLarge", "--stage", "forward"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("\nDIVERGES  ") == 1
    assert "(and in 2 other cases)" in printed


def test_advice_names_the_taps_around_an_unknown_cause(capsys):
    main(["pair", f"{MODELS}:Original", f"{MODELS}:UnknownCause", "--stage", "forward", "--seeds", "1"])
    assert "CAUSE     not recognized; compare the code between up and hidden, or add taps there" in (
        capsys.readouterr().out
    )
