"""int8 and bfloat16 inference (docs/how-to/low-precision.md), and the script that measures it."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import random_weights, tiny_config
from native_models import BATCH, SETTINGS, SOURCE

from transformer_parity.apps.text.dates import SHIPPED

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT = DOCS / "examples" / "low_precision.py"
script = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
CONFIG = tiny_config(d_model=64, d_k=16, d_v=16, num_heads=4, d_ff=128, num_encoder_layers=1, num_decoder_layers=1)
MATRICES = 4 * 64 * 64 + 2 * 64 * 128  # in an encoder layer
MATRICES += 8 * 64 * 64 + 2 * 64 * 128  # in a decoder layer
OUTPUTS = 12 * 64 + 2 * (128 + 64)
INT8 = {"torch": "int8, quantize_dynamic", "jax": "int8, Int8Linear", "tf": 'int8, quantize("int8")'}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*are deprecated:UserWarning"),
]


@pytest.fixture
def load(port):
    return partial(port.package.Transformer.from_weights, CONFIG, random_weights(CONFIG))


def test_int8_weights_use_a_quarter_of_the_memory(port, load):
    full = script.stored_bytes(port.name, load())
    assert list(full) == ["float32"]
    found = script.stored_bytes(port.name, script.VARIANTS[port.name][INT8[port.name]](load))
    # Only Keras quantizes the embedding matrix.
    table = CONFIG.source_vocab_size * CONFIG.d_model if port.name == "tf" else 0
    assert found["int8"] == MATRICES + table
    assert full["float32"] - 4 * found["int8"] <= found["float32"] < full["float32"] - 3 * found["int8"]


def test_bfloat16_weights_use_half_the_memory(port, load):
    found = script.stored_bytes(port.name, script.VARIANTS[port.name]["bfloat16"](load))
    (full,) = script.stored_bytes(port.name, load()).values()
    assert found == {"bfloat16": full / 2}


def test_int8_logits_are_close_to_float32_logits(port, load):
    expected = port.to_numpy(load()(*BATCH[:2]))
    found = port.to_numpy(script.VARIANTS[port.name][INT8[port.name]](load)(*BATCH[:2]))
    assert 0.0 < np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.extended("examples", "tf")
def test_search_after_quantization_uses_the_int8_weights(port, load):
    """This also holds after a search with the float32 weights, whose compiled code must not be reused."""
    model = load()
    before = port.package.greedy_search(model, SOURCE, max_length=4)
    quantized = script.VARIANTS[port.name][INT8[port.name]](lambda: model)
    after = port.package.greedy_search(quantized, SOURCE, max_length=4)
    again = port.package.greedy_search(script.VARIANTS[port.name][INT8[port.name]](load), SOURCE, max_length=4)
    assert (after.scores != before.scores).all()
    assert np.array_equal(after.scores, again.scores)


def test_weights_and_gradients_of_an_int8_model_are_rejected(port, load):
    model = script.VARIANTS[port.name][INT8[port.name]](load)
    for refused in (
        model.export_weights,
        lambda: port.package.gradients(model, *BATCH),
        lambda: port.package.Trainer(model, SETTINGS).export_state(),
    ):
        with pytest.raises(ValueError, match=r"is quantized to int8|must compute with its .* only: got"):
            refused()


@pytest.mark.only("torch")
def test_missing_package_is_named_in_the_table(port, monkeypatch):
    monkeypatch.setitem(script.compare.__globals__, "find_spec", lambda name: None)
    texts = script.Texts(script.read_trained(SHIPPED), [], [])
    row = script.compare("torch", "int8, torchao Int8WeightOnlyConfig", texts, None, 0.0)
    assert list(script.table([row]))[2].startswith(
        "| torch | int8, torchao Int8WeightOnlyConfig | not installed: pip install torchao |"
    )


@pytest.mark.only("torch")
@pytest.mark.needs(importlib.util.find_spec("torchao"), "torchao")
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_quantizes_linear_layers(port, load, name):
    model = script.VARIANTS["torch"][f"int8, torchao {name}"](load)
    assert script.stored_bytes("torch", model)["int8"] == MATRICES + OUTPUTS  # one zero point per output
    assert port.package.greedy_search(model, SOURCE, max_length=4).ids.shape == (2, 4)


@pytest.mark.only("torch")
def test_int8_variant_without_int8_weights_raises_runtime_error(port, monkeypatch):
    variants = {"torch": {"int8, broken": lambda load: load()}}
    monkeypatch.setitem(script.compare.__globals__, "VARIANTS", variants)
    texts = script.Texts(script.read_trained(SHIPPED), ["May 4, 2024"], ["2024-05-04"])
    with pytest.raises(RuntimeError, match="torch int8, broken must store int8: got float32"):
        script.compare("torch", "int8, broken", texts, None, 0.0)


@pytest.mark.extended("examples", "tf")
def test_low_precision_script_writes_a_table(port, tmp_path, monkeypatch, capsys):
    variants = {port.name: {INT8[port.name]: script.VARIANTS[port.name][INT8[port.name]]}}
    monkeypatch.setitem(script.main.__globals__, "VARIANTS", variants)
    (tmp_path / "source").write_text("Freitag, 3. Mai 2024\nMay 4, 2024\n", "utf-8")
    (tmp_path / "target").write_text("2024-05-03\n2024-05-04\n", "utf-8")
    files = ["--json", f"{tmp_path}/out.json", "--markdown", f"{tmp_path}/out.md"]
    script.main([str(SHIPPED), f"{tmp_path}/source", f"{tmp_path}/target", *files])
    float32, row = json.loads((tmp_path / "out.json").read_text("utf-8"))["rows"]
    assert row["sentences"] == 2
    assert row["same"] == {"greedy": 2, "beam 4": 2}
    assert row["bytes"]["int8"] > 400_000
    assert sum(row["bytes"].values()) < 0.5 * sum(float32["bytes"].values())
    line = capsys.readouterr().out.splitlines()[-1]
    assert line in (tmp_path / "out.md").read_text("utf-8")


def test_page_contains_the_code_of_the_script():
    code = (DOCS / "examples" / "int8_linear.py").read_text("utf-8").partition("\n\n")[2]
    assert code in (DOCS / "how-to" / "low-precision.md").read_text("utf-8")


@pytest.fixture(autouse=True)
def restore_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
