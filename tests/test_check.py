"""The `parity check` command: its output, verdicts, exit codes, and behavior on interruption."""

import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import psutil
import pytest
import tiers

import reference_numpy as ref
from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED, IMPRECISE, Finding
from transformer_parity.engine.verdict import Verdict
from transformer_parity.transformer.cases.case import ACTIVATIONS
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.check.checked_port import CheckedPort
from transformer_parity.transformer.check.messages import PortJob
from transformer_parity.transformer.check.processes import WORK, run_all
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.sentences.pairs import read_pairs
from transformer_parity.transformer.sentences.subwords import Subwords
from transformer_parity.transformer.sentences.vocabulary import batch, pick

TORCH_ONLY = ["check", "--backends", "torch"]


def finding(verdict, error=0.0, tolerance=1.0):
    return Finding(
        "torch", "float64", "full model", "full/padded", "taps", "logits", error, tolerance, verdict, "", ACTIVATIONS
    )


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], 3),
        ([AGREES], 0),
        ([AGREES, IMPRECISE], 2),
        ([IMPRECISE, DIVERGES, AGREES], 1),
        ([FAILED, AGREES], 3),
        ([FAILED, IMPRECISE], 3),
        ([FAILED, DIVERGES], 1),
    ],
)
def test_exit_code_is_the_worst_verdict(verdicts, code):
    assert Verdict.of([finding(verdict) for verdict in verdicts]).exit_code == code


def test_empty_comparison_never_passes():
    assert Verdict.of([]).verdict == FAILED


def test_agreeing_port_passes_the_check(capsys, tmp_path):
    path = tmp_path / "result.json"
    code = main([*TORCH_ONLY, "--preset", "paper_base,marian", "--sentences", "0", "--json", str(path)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "AGREE  1 port, 8 cases" in printed  # activations, gradients, and two searches for each of two models
    for line in ("float64 (checks the math)", "NOT TESTED: jax", "NOT TESTED: tf", "NOT TESTED: gpu"):
        assert line in printed
    document = json.loads(path.read_text())
    result = document["result"]
    assert document["verdict"] == "AGREE"
    assert result["failures"] == []
    assert {row["dtype"] for row in result["summary"]} == {"float64", "float32", "bfloat16"}
    assert all(row["worst"]["ratio"] < 1 for row in result["summary"])
    assert "version" in document["environment"]["torch"]


def test_check_runs_only_the_requested_stage(capsys):
    assert main([*TORCH_ONLY, "--preset", "marian", "--stage", "gradients", "--sentences", "0"]) == 0
    captured = capsys.readouterr()
    printed = captured.out
    assert captured.err.startswith("comparing torch with the reference in float64")  # printed before torch is imported
    assert "AGREE  1 port, 1 case," in printed
    assert "NOT TESTED: activations, steps, decode (not in --stage)" in printed
    for options, message in (
        (["--stage", "steps", "--preset", "marian"], "remove --preset, or remove steps"),
        (["--stage", "gradients", "--text", "a", "b"], "--text and --weights require --stage activations"),
        (["--sentences", "0", "--text", "a", "b"], "remove --sentences 0"),
        (["--sentences", "-1"], "--sentences must be at least 0: got -1"),
        (["--stage", "attention"], "unknown attention"),
    ):
        with pytest.raises(SystemExit) if "attention" in options else nullcontext():
            assert main([*TORCH_ONLY, *options]) == 3
        assert message in capsys.readouterr().err


def test_check_runs_user_weights_on_user_text(capsys, tmp_path):
    config = ref.TransformerConfig(
        source_vocab_size=300, target_vocab_size=300, d_model=32, num_heads=4, d_ff=64, num_encoder_layers=1
    )
    ref.save_weights(tmp_path / "model.safetensors", config, ref.init_weights(config))
    for name, lines in (("a.gz", "Good morning.\nWhere is it?\n"), ("b.gz", "Guten Morgen.\nWo ist es?\n")):
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()))
    text = ["--text", str(tmp_path / "a.gz"), str(tmp_path / "b.gz")]
    code = main([*TORCH_ONLY, "--weights", str(tmp_path / "model.safetensors"), *text, "--dtype", "float64"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "encoder.layers.0" in printed
    assert "sentences/model.safetensors" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "absent.safetensors"], "there is no weight file absent.safetensors"),
        (["--text", "absent.en", "absent.de"], "absent.en"),
        (["--sentences", "-1"], "--sentences must be at least 0: got -1"),
        (["--json", "absent/result.json"], "there is no directory absent"),
    ],
)
def test_invalid_check_options_exit_with_code_3(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", *options]) == 3
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_wrong_usage_exits_with_3_because_2_means_precision(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["check", "--backends", "numpy,theano"])
    assert exit_.value.code == 3
    assert "unknown theano; choose from numpy, torch, jax, tf" in capsys.readouterr().err


def test_missing_framework_error_contains_the_install_command(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flax" else find_spec(name))
    assert main(["check", "--backends", "torch,jax"]) == 3
    assert "flax is not installed; run pip install 'transformer-parity[cli,jax]'" in capsys.readouterr().err


def test_missing_gpu_makes_the_check_incomplete(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides any GPU from the port's process
    assert main([*TORCH_ONLY, "--device", "gpu", "--preset", "torch", "--sentences", "0"]) == 3
    printed = capsys.readouterr().out
    assert "no GPU is visible to torch" in printed
    assert "INCOMPLETE" in printed


@pytest.mark.parametrize("name", tiers.first_alone(["SIGINT", *(["SIGTERM"] if os.name != "nt" else [])], "signals"))
def test_interrupted_check_is_reported_as_incomplete(name):
    command = [sys.executable, "-m", "transformer_parity", *TORCH_ONLY, "--dtype", "float64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (line := process.stdout.readline()).startswith("torch: "):
        assert line, "it has ended"
    process.send_signal(signal.CTRL_C_EVENT if os.name == "nt" else getattr(signal, name))
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 3, printed
    assert "interrupted before everything was compared" in printed
    assert "INCOMPLETE" in printed
    assert "AGREE " not in printed
    assert "Traceback" not in printed


def test_crashed_process_is_reported_for_its_port():
    port, killed = CheckedPort(PortJob("torch", Placements(("float64",))), standard_cases()), False
    for _ in run_all([port]):
        if port.doing.endswith("feed_forward/relu") and not killed:
            (process,) = [child for child in psutil.Process().children() if WORK in child.cmdline()]
            process.kill()
            killed = True
    assert "the process ended with exit code" in port.findings[-1].detail
    assert Verdict.of(port.findings).exit_code == 3


def test_shipped_text_is_aligned_and_varied():
    pairs = read_pairs()
    assert len(pairs) > 300
    assert len(set(pairs)) == len(pairs)
    assert max(len(source.split()) for source, _ in pairs) > 20
    assert min(len(source.split()) for source, _ in pairs) == 1


def test_invalid_text_files_are_rejected(tmp_path):
    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    one, two = write("one", b"a\n"), write("two", b"b\nc\n")
    with pytest.raises(ValueError, match="must be line-aligned: got 1 and 2 lines"):
        read_pairs(one, two)
    with pytest.raises(ValueError, match="is not valid UTF-8"):
        read_pairs(one, write("latin", "ä\n".encode("latin-1")))
    with pytest.raises(ValueError, match="is not a valid gzip file"):
        read_pairs(one, write("fake.gz", b"no gzip"))
    with pytest.raises(ValueError, match="must contain at least one pair of nonempty lines"):
        read_pairs(write("empty", b"\n"), one)


def test_subword_ids_avoid_special_ids():
    vocabulary = Subwords.train([line for pair in read_pairs() for line in pair], 300)
    for special in ({"pad_id": 0, "bos_id": 1, "eos_id": 2}, {"pad_id": 1, "bos_id": 1, "eos_id": 0}):
        config = ref.TransformerConfig(source_vocab_size=400, target_vocab_size=400, **special)
        ids = vocabulary.numbered(config).ids("Where is the train?")
        assert ids[-1] == config.eos_id
        assert not set(ids[:-1]) & set(special.values())
        assert len(ids) == len(vocabulary.pieces("Where is the train?")) + 1
    small = ref.TransformerConfig(source_vocab_size=50, target_vocab_size=50)
    with pytest.raises(ValueError, match="subwords and 3 special tokens require source_vocab_size"):
        vocabulary.numbered(small)


def test_batches_are_padded_and_spread_over_lengths():
    pairs = read_pairs()
    chosen = pick(pairs, 5)
    lengths = [len(source) for source, _ in chosen]
    assert lengths == sorted(lengths)
    assert lengths[0] < 10 < 60 < lengths[-1]
    config = ref.TransformerConfig(source_vocab_size=400, target_vocab_size=400)
    vocabulary = Subwords.train([line for pair in pairs for line in pair], 300)
    ids = batch(chosen, vocabulary.numbered(config), config)
    assert (ids["target_ids"][:, 0] == config.bos_id).all()
    assert (ids["source_ids"][0] == config.pad_id).sum() > (ids["source_ids"][-1] == config.pad_id).sum() == 0
    assert np.issubdtype(ids["source_ids"].dtype, np.integer)
