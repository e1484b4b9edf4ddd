"""The JSON results of all commands share one envelope and one schema."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from imports import ROOT
from jsonschema import Draft202012Validator
from result_schema import SCHEMA, VALIDATOR, read_document, violations

import reference_numpy as ref
from transformer_parity.apps.text.dates import SHIPPED
from transformer_parity.apps.train import corpora
from transformer_parity.cli.main import COMMANDS, RESULTS, main, make_parser
from transformer_parity.engine.report.envelope import WORDS, envelope
from transformer_spec.config import TransformerConfig

ELSEWHERE = {"check-distributed": "test_distributed", "pair": "test_init_pair", "selftest": "test_selftest"}
SILENT = {"init-pair", "init-port", "golden", "checkpoint", "source", "show"}  # write files or text but no JSON result
PORT = """
import reference_numpy
from transformer_parity.plugin import Port


class One(Port):
    def load(self, config, weights, dtype):
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids) * {factor}
"""
SMALL = "--set d_model=8 num_heads=1 d_ff=8 num_encoder_layers=1 num_decoder_layers=1 tokens_per_batch=200"
MARIAN = {
    **{"source_vocab_size": 9, "target_vocab_size": 9, "d_model": 8, "num_heads": 1, "d_ff": 8},
    **{"num_encoder_layers": 1, "num_decoder_layers": 1},
}
BENCH = "bench forward --backends numpy --config tiny --batch 1 --source 4 --target 4 --threads 1 --rounds 1"
RUNS = {  # command line, exit code, and verdict
    "check": ("check --port right:One --stage activations --dtype float64", 0, "AGREE"),
    "check, diverging": ("check --port wrong:One --stage activations --dtype float64", 1, "DIVERGE"),
    "check, incomplete": ("check --port right:One --stage gradients --dtype float64", 3, "INCOMPLETE"),
    "compare": ("compare truth mine --stage activations", 0, "AGREE"),
    "evaluate": (f"evaluate {SHIPPED} --task dates --sentences 3 --backend numpy", 0, None),
    "explore": ("explore 2024 2024 --backends numpy", 0, "AGREE"),
    "bench": (BENCH, 0, "AGREE"),
    "import": ("import hf --out imported.safetensors --backend numpy", 0, "AGREE"),
    "import, only described": ("import hf", 0, None),
    "export": ("export model.safetensors --format hf --out copy", 0, None),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, factor in (("right", "(1 + 1e-15)"), ("wrong", 1.01)):
        (tmp_path / f"{name}.py").write_text(PORT.format(factor=factor))
    return tmp_path


def prepare(line: str) -> None:
    """Write the files that a command line reads."""
    if line.startswith("compare"):
        for options in ("--for right:One --out truth", "--port right:One --out mine"):
            assert main(["golden", "--dtype", "float64", *options.split()]) == 0
    if line.startswith(("import", "export")):
        config = TransformerConfig.preset("marian", **MARIAN)
        ref.save_weights("model.safetensors", config, ref.init_weights(config, seed=0))
        assert main(["export", "model.safetensors", "--format", "hf", "--out", "hf"]) == 0


@pytest.mark.parametrize("name", RUNS)
def test_command_writes_its_result_in_the_envelope(name, here):
    line, code, verdict = RUNS[name]
    prepare(line)
    assert main([*line.split(), "--json", "result.json"]) == code
    document = read_document(here / "result.json", line.split()[0])
    assert (document["exit_code"], document["verdict"]) == (code, verdict)
    assert document["version"] == ref.__version__
    assert document["seconds"] > 0


@pytest.mark.parametrize("line", ["info", "info --names marian", f"info {SHIPPED}"])
def test_info_prints_a_valid_json_result(line, capsys):
    assert main([*line.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert violations(document) == []
    assert (document["command"], document["verdict"]) == ("info", None)


def test_translate_prints_the_json_result_as_the_last_line(capsys, ports):
    assert main(["translate", "--text", "3 May 2024", "--backend", "numpy", "--json"]) == 0
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["hypotheses"][0]["text"] == "2024-05-03"
    assert violations(last) == []
    assert (last["command"], last["verdict"], last["result"]["lines"]) == ("translate", None, 1)
    for port in ports:
        asked = ["--compare", "--backends", f"numpy,{port.name}"]
        assert main(["translate", "--text", "3 May 2024", *asked, "--json"]) == 0
        (last,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert violations(last) == []
        assert (last["verdict"], last["result"]["same"]) == ("AGREE", 1)


def test_train_writes_the_json_result_to_the_run_directory(here, monkeypatch):
    monkeypatch.setattr(corpora, "DATES_TRAINED", 60)
    monkeypatch.setattr(corpora, "DATES_HELD_OUT", 6)
    assert main(f"train --task dates --backend numpy --steps 2 --out run {SMALL}".split()) == 0
    document = read_document(here / "run" / "result.json", "train")
    assert list(document["result"]["reached"]) == ["numpy"]
    assert document["result"]["files"] == ["model.safetensors", "curve.png", "log.jsonl"]
    assert main(["train", "--resume", "run", "--backend", "numpy", "--steps", "4", "--stop-at", "3"]) == 0
    assert not (here / "run" / "result.json").exists()  # described only the first two steps


STALE = {"result.json": '{"verdict": "AGREE"}', "page.html": "AGREE"}


@pytest.fixture
def stale(here):
    """Return a directory that contains the results of an earlier run."""
    for name, text in STALE.items():
        (here / name).write_text(text)
    return here


@pytest.mark.parametrize(
    "line",
    [
        "check --port right:One --json result.json --html=page.html --unknown",
        "check --dtype float16 --js result.json --htm page.html",
        "check --port absent:One --isolate x=y --html page.html --json=result.json",
        "check-distributed --backends numpy --html page.html --json result.json",
        "compare absent absent --json result.json",
        "selftest --json result.json --backends unknown",
        "evaluate absent --task dates --json result.json",
        "import absent --json result.json",
        "export absent --format hf --out copy --json result.json",
        "explore 2024 --json result.json --out page.html --backends unknown",
        "bench forward --json result.json --unknown",
    ],
)
def test_results_of_an_earlier_run_are_deleted_before_an_error(line, stale):
    with pytest.raises(SystemExit, match="3"):  # argparse exits this way
        sys.exit(main(line.split()))
    assert {path.name for path in stale.iterdir()} & STALE.keys() == STALE.keys() - {
        name for name in STALE if name in line
    }


def test_results_of_an_earlier_run_are_deleted_before_a_command_is_imported(stale, monkeypatch):
    monkeypatch.setattr("transformer_parity.cli.main.import_module", None)
    assert main(["check", "--json", "result.json"]) == 3
    assert not (stale / "result.json").exists()


@pytest.mark.parametrize("second", ["result.json", "./result.json", "link.json", "hard.json"])
def test_two_options_must_name_different_files(second, stale, capsys):
    (stale / "link.json").symlink_to("result.json")
    (stale / "hard.json").hardlink_to("result.json")
    assert main(["check", "--json", "result.json", "--html", second]) == 3
    assert "--json result.json: another option refers to the same file" in capsys.readouterr().err
    assert not (stale / "result.json").exists()
    assert main(["compare", second, "x", "--json", second]) == 3
    assert f"--json {second}: another argument refers to the same file" in capsys.readouterr().err


def test_file_without_a_result_is_not_deleted(stale, capsys):
    for line in (
        "check --help --json result.json",
        "info --json result.json",
        "evaluate result.json --json result.json",
    ):
        with suppress(SystemExit):
            main(line.split())
        assert (stale / "result.json").read_text() == STALE["result.json"]


def test_links_and_devices_are_not_deleted(stale):
    (stale / "link.json").symlink_to("result.json")
    assert main(["compare", "absent", "x", "--json", "link.json"]) == 3
    assert (stale / "link.json").is_symlink()
    assert not (stale / "result.json").exists()
    assert main(["compare", "absent", "x", "--json", "/dev/null"]) == 3
    assert os.path.exists("/dev/null")


def test_every_result_file_option_is_registered():
    for command in COMMANDS:
        (commands,) = (action.choices for action in make_parser(command)._actions if action.choices)
        parsers, found = [*commands.values()], set()
        while parsers:
            for action in parsers.pop()._actions:
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
                found |= {*action.option_strings} if action.type is Path else set()
        written = {"--json", "--html", "--plot"} | ({"--out"} if command == "explore" else set())
        assert found & written == {*RESULTS.get(command, ())}, command


def test_result_schema_is_a_valid_json_schema():
    Draft202012Validator.check_schema(SCHEMA)


def test_every_command_is_in_the_schema_or_writes_no_result():
    described = set(SCHEMA["properties"]["command"]["enum"])
    assert described | SILENT == set(COMMANDS)
    tried = {line.split()[0] for line, _, _ in RUNS.values()} | {"info", "translate", "train"}
    assert tried | set(ELSEWHERE) == described


def test_schema_ties_the_verdict_to_the_exit_code():
    assert WORDS == {0: "AGREE", 1: "DIVERGE", 2: "IMPRECISE", 3: "INCOMPLETE"}
    result = {"path": "a", "out": "b", "format": "hf", "files": [], "notes": []}
    for code in WORDS:
        document = envelope("export", result, exit_code=code, seconds=0.5)
        assert violations(document) == []
        wrong = {**document, "exit_code": (code + 1) % 4}
        assert violations(wrong) == [("$.exit_code", "const")]


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        ({"extra": 1}, ("$", "additionalProperties")),
        ({"format": 2}, ("$.format", "const")),
        ({"verdict": "agrees"}, ("$.verdict", "enum")),
        ({"command": "curve"}, ("$.command", "enum")),
        ({"result": {"path": "a"}}, ("$.result", "required")),
    ],
)
def test_result_schema_rejects_invalid_documents(change, violation):
    result = {"path": "a", "out": "b", "format": "hf", "files": [], "notes": []}
    document = envelope("export", result, compares=False, seconds=0.5)
    assert violation in violations({**document, **change})
    del document["seconds"]
    assert violations(document) == [("$", "required")]
    assert VALIDATOR.is_valid({**document, "seconds": None})


@pytest.mark.parametrize("machine", ["amd", "intel"])
def test_committed_bench_results_match_the_schema(machine):
    paths = [path for path in (ROOT / "benchmarks" / machine).glob("*.json") if "translate" not in path.name]
    for path in paths:
        if path.name != "import.json":
            read_document(path, "bench")
    assert len(paths) > 8
