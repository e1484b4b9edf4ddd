"""`parity info`, `parity source`, and `parity show`: their output, plots, and error messages."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from command_runs import _pipe as _pipe  # an autouse fixture
from command_runs import bare as bare  # a fixture
from conftest import parity

import reference_numpy as ref
from transformer_parity.apps.train import corpora
from transformer_parity.cli import describe_presets as presets
from transformer_parity.cli import info
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.registry import PORTS


@pytest.mark.usefixtures("bare")
def test_info_runs_without_frameworks(capsys, monkeypatch):
    code, out, err = parity(capsys, "info")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "fails" not in out
    assert "37,000 reproduces 0, 41,096 reproduces 10" in " ".join(out.split())
    monkeypatch.setenv("COLUMNS", "50")  # narrower than the command to be copied
    out = parity(capsys, "info")[1]
    for name in PORTS:
        assert (f"pip install 'transformer-parity[cli,{name}]'\n" in out) == (name != "numpy")
    monkeypatch.delattr(PackagePort, "import_package")  # simulates a broken installation
    assert "numpy: cannot be imported: AttributeError:" in parity(capsys, "info")[1]


def test_info_describes_installed_backends(capsys, monkeypatch, backends):
    expected = {backend.name: backend.package.describe() for backend in backends}  # this imports the packages first
    monkeypatch.setattr(info, "PORTS", {backend.name: PORTS[backend.name] for backend in backends})
    found = json.loads(parity(capsys, "info", "--json")[1])["result"]["backends"]
    for backend in backends:
        runtime = backend.package.runtime
        known = {"installed": True, "dtypes": list(runtime.DTYPES), "runs on": list(runtime.DEVICES)}
        matmuls = {row: found[backend.name].pop(row) for row in (info.RATE, "matmul library on a CPU")}
        assert matmuls[info.RATE] > 0.1
        assert re.match("openblas|MKL; measured|XLA|oneDNN", matmuls["matmul library on a CPU"])
        assert found[backend.name].pop(info.BY_ONEDNN, 1.0) > 0.1  # present only if oneDNN is much faster
        described = {row: said for row, said in expected[backend.name].items() if row not in matmuls}
        assert found[backend.name] == {**described, **known}


def test_info_reports_slow_libraries():
    rates = lambda **found: {name: {info.RATE: rate} for name, rate in found.items()}  # noqa: E731
    even, uneven = rates(numpy=100.0, torch=61.0), rates(numpy=140.0, torch=150.0, jax=300.0)
    assert list(info.slow(even, 0.0)) == list(info.slow({"jax": {"error": "no"}}, 0.0)) == []
    assert list(info.slow(uneven, 0.0)) == [
        "numpy: matmul throughput is 47% of jax, the best on this machine",
        "torch: matmul throughput is 50% of jax, the best on this machine",
    ]
    uneven["torch"][info.BY_ONEDNN] = 400.0
    assert list(info.slow(uneven, 0.0))[1] == (
        "torch: matmul throughput is 38% of torch with oneDNN, the best on this machine; "
        'torch.set_float32_matmul_precision("medium") selects oneDNN'
    )
    busy = "the machine is busy (load average 1000.0), so the measured throughputs vary"
    assert list(info.slow(uneven, 1000.0)) == [busy]
    assert list(info.slow(even, 1000.0)) == []


@pytest.mark.usefixtures("bare")
def test_info_counts_parameters(capsys):
    presets = json.loads(parity(capsys, "info", "--json")[1])["result"]["presets"]
    assert list(presets) == list(ref.PRESETS)
    assert presets["paper_base"] == {"parameters": 63_045_632, "printed_millions": 65, "differs": {}}
    assert presets["paper_d256"] == {"parameters": 26_816_512, "printed_millions": 28, "differs": {"d_model": 256}}
    smaller = json.loads(parity(capsys, "info", "--json", "--vocab", 1000)[1])["result"]["presets"]
    assert presets["paper_base"]["parameters"] - smaller["paper_base"]["parameters"] == 36_000 * 512


@pytest.mark.parametrize("preset", ref.PRESETS)
def test_listed_differences_turn_paper_base_into_the_preset(preset):
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9}
    fields = presets.differences(preset)
    rates = {name.partition(".")[2]: fields.pop(name) for name in list(fields) if name.startswith("dropout.")}
    rebuilt = ref.TransformerConfig.preset("paper_base", **sizes, **fields, dropout=ref.DropoutRates(**rates))
    assert rebuilt == ref.TransformerConfig.preset(preset, **sizes)


def test_framework_output_is_hidden_unless_an_error_occurs(capfd):
    with quiet_frameworks() as terminal:
        os.write(2, b"oneDNN is on\n")
        print("spinner", file=terminal)
    assert capfd.readouterr().err == "spinner\n"
    with pytest.raises(ValueError, match="many"), quiet_frameworks():  # noqa: PT012  the whole block is tested
        os.write(2, b"the reason\n")
        int("many")
    os.write(2, b"and on\n")
    assert capfd.readouterr().err == "the reason\nand on\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("info --vocab 2", "--vocab 2: eos_id must be below the vocabulary size 2"),
        ("source Linear --backends mxnet", "unknown mxnet; choose from numpy, torch, jax, tf"),
        (
            "source transformer_backward --backends tf",
            "transformer_backward is not in transformer_tf, but in reference_numpy",
        ),
        ("show positions --preset paper_learned", "presets must have sinusoidal positions: got"),
        ("show positions --size 0x64", "must be a positive integer: got '0'"),
        ("show positions --size 50x7", "require an even d_model: got 7"),
        ("show masks --out x.pdf", "--out must be a directory, or a file name that ends in .png or .svg: got x.pdf"),
        ("show masks --out some_file/x.png", "some_file"),
        (
            "show attention --backends numpy,jax",
            "jax, which is not installed: run pip install 'transformer-parity[cli,jax]'",
        ),
        ("show attention --backends numpy --layer 2", "--layer must be from 0 to 1 for this model: got 2"),
        ("show attention --backends numpy --layer -1", "--layer must be from 0 to 1 for this model: got -1"),
        ("show attention --weights none.safetensors", "there is no weight file none.safetensors"),
        ("show attention --weights some_file", "some_file is not a usable weight file"),
    ],
)
@pytest.mark.usefixtures("bare")
def test_wrong_usage_exits_with_3(capsys, tmp_path, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(PackagePort, "load")  # arguments are checked before any model runs
    Path("some_file").write_text("some text")
    code, out, err = parity(capsys, *command.split())
    assert (code, out) == (3, "")
    assert err.splitlines()[-1].startswith(f"parity {command.split()[0]}")
    assert message in err.splitlines()[-1].partition("error: ")[2]
    assert os.listdir() == ["some_file"]


ABSURD = {
    "bench forward --scale depth=100000": "100000+100000 layers",
    "bench train --batch 1000000000": "1000000000 sentences",
    "bench decode --target 1000000000000 --backends numpy": "1000000000000 tokens",
    "bench forward --scale depth=1,1000000000 --backends numpy": "1000000000+1000000000 layers",
    "show positions --size 1000000000000x64": "a figure of 1,000,000,000,000 by 64",
    "show positions --size 50x1000000000000": "a figure of 50 by 1,000,000,000,000",
    "train --task dates --set num_encoder_layers=1000000000 --backends numpy": "training 131,",
    "train --task dates --set d_ff=1000000000000 --backends numpy": "training ",
    "train --task dates --set tokens_per_batch=1000000000000 --backends numpy": "a batch of 1,000,000,000,000 tokens",
}


@pytest.mark.parametrize("command", ABSURD)
def test_excessive_size_is_rejected_immediately(command, capsys, tmp_path, monkeypatch):
    """The size is rejected before any memory is allocated, because the check uses only the available memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**29))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpora, "DATES_TRAINED", 2000)
    monkeypatch.setattr(corpora, "DATES_HELD_OUT", 9)
    code, out, err = parity(capsys, *command.split())
    assert (code, out) == (3, "")
    assert re.search(r" requires at least [\d,]+ GiB of memory: only [\d,.]+ GiB are available$", err)
    assert ABSURD[command] in err
    assert os.listdir() == []
