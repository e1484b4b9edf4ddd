"""Hugging Face checkpoints: imported models compute the same as transformers, which can load the exported ones.

The tests run offline with random weights. transformers writes the checkpoints, and a process that can't import
transformers reads them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16
import pytest
import test_vocabularies
import torch
import vocabulary_files
from hf_checkpoints import Form, saved
from hf_checkpoints import directory as directory  # a fixture
from imports import ROOT
from third_party import relative_error
from tiers import first_alone

import reference_numpy as ref
from transformer_parity.apps.checkpoints import proof
from transformer_parity.apps.checkpoints.formats import huggingface_families
from transformer_parity.apps.checkpoints.formats.huggingface_t5 import T5_FAMILIES
from transformer_parity.apps.checkpoints.importer import export_checkpoint, import_checkpoint, load, save
from transformer_parity.apps.checkpoints.name_mapping import same
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS

EXACT, AS_IT_COMES = 1e-12, 1e-7
DIFFERS = 1e-7
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37}
FAMILIES = ("marian", *(name for name in huggingface_families.FAMILIES if name not in ("marian", *T5_FAMILIES)))
FORMS = [
    Form("marian"),
    Form("fsmt", {"src_vocab_size": 37}),
    *(Form(family) for family in FAMILIES if family not in ("marian", "fsmt")),
    Form("fsmt", {"tie_word_embeddings": True}),
    *(Form(family, {"tie_word_embeddings": False}) for family in FAMILIES if family != "fsmt"),
    Form("marian", SEPARATE),
    Form("marian", {**SEPARATE, "tie_word_embeddings": False}),
    Form("marian", dtype=torch.float16),
    Form("marian", pickled=True),
    Form("marian", SEPARATE, shard="4KB"),
    Form("m2m_100", {"tie_word_embeddings": False}, pickled=True, shard="4KB"),
    Form("pegasus", dtype=torch.float16, pickled=True),
    Form("fsmt", dtype=torch.bfloat16),
]
CHILD = """
import sys
for name in ("torch", "transformers", "jax", "tensorflow", "keras"):
    sys.modules[name] = None  # an import of it is an ImportError
from transformer_parity.apps.checkpoints.importer import import_checkpoint, save
for directory in sys.argv[1:]:
    save(f"{directory}.safetensors", import_checkpoint(directory))
"""


def imported_elsewhere(*directories: Path) -> None:
    """Import checkpoint directories in a process that has neither torch nor transformers, to files next to them."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, *map(str, directories)]
    child = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def theirs_of(model, config):
    """Return transformers' logits, both with its own positional encoding table and with the exact one."""
    inputs = proof.inputs_of(config)
    as_it_comes = proof._logits(model, inputs, config)
    if config.position_encoding == "sinusoidal":
        proof._replace_positions(model, config)
    return as_it_comes, proof._logits(model, inputs, config)


def error_of(config, weights, theirs, backend="numpy"):
    """Return the error of a backend's logits relative to the given ones, at non-padding positions."""
    inputs = proof.inputs_of(config)
    ours = PORTS[backend].load(config, weights, Placement("float64")).run("", inputs, taps=False).output
    real = ref.target_padding_mask(inputs["target_ids"], config.pad_id)
    return relative_error(ours[real], theirs[real])


@pytest.mark.extended("backends", "jax", "tf")
@pytest.mark.parametrize("form", [FORMS[0], *first_alone(FORMS[1:], "formats")], ids=str)
def test_logits_match_transformers(tmp_path, form, backend):
    model = saved(form, tmp_path / "model")
    if form is FORMS[0] and backend.name == "numpy":
        imported_elsewhere(tmp_path / "model")
        config, weights = ref.load_weights(tmp_path / "model.safetensors")
    else:
        imported = import_checkpoint(tmp_path / "model")
        config, weights = imported.config, imported.weights
    if form.dtype != torch.float32:
        assert {array.dtype.name for array in weights.values()} == {str(form.dtype).removeprefix("torch.")}
    as_it_comes, exact = theirs_of(model, config)
    assert error_of(config, weights, exact, backend.name) <= EXACT
    if form.dtype == torch.float32:  # at lower precision, the position table is rounded too
        assert error_of(config, weights, as_it_comes, backend.name) <= AS_IT_COMES


AXES = {
    "norm_order": ("post", "pre"),
    "layer_norm_epsilon": (1e-6, 1e-5),
    "layer_norm_kind": ("standard", "annotated"),
    "position_layout": ("interleaved", "split"),
    "position_timescale": ("m", "m_minus_1"),
    "position_offset": (0, 1, 2),
    "scale_embedding": (True, False),
    "activation": ("relu", "gelu", "gelu_tanh", "swish"),
}


@pytest.mark.parametrize("form", first_alone(FORMS[:8], "formats"), ids=str)
def test_neighboring_convention_gives_different_logits(tmp_path, form):
    model = saved(form, tmp_path / "model")
    imported = import_checkpoint(tmp_path / "model")
    config, (_, exact) = imported.config, theirs_of(model, imported.config)

    def error(config, weights=imported.weights):
        return error_of(config, weights, exact)

    assert error(config) <= EXACT
    for axis, values in AXES.items():
        if axis in ("position_layout", "position_timescale") and config.position_encoding == "learned":
            continue
        for value in values:
            if value != getattr(config, axis):
                assert error(config.replace(**{axis: value})) > DIFFERS, (axis, value)
    if config.tie_embeddings == "none":
        table = imported.weights["target_embedding.table"]
        assert error(config, {**imported.weights, "output_proj.kernel": table.T}) > DIFFERS
    weights, swap = imported.weights.items(), {"query_proj": "key_proj", "key_proj": "query_proj"}
    swapped = {re.sub("query_proj|key_proj", lambda found: swap[found[0]], name): array for name, array in weights}
    assert error(config, swapped) > DIFFERS


@pytest.mark.parametrize("form", first_alone(FORMS, "formats"), ids=str)
def test_exported_checkpoint_loads_in_transformers_and_round_trips(tmp_path, form):
    import transformers

    saved(form, tmp_path / "model")
    imported = import_checkpoint(tmp_path / "model")
    save(tmp_path / "ours.safetensors", imported)
    assert export_checkpoint(load(tmp_path / "ours.safetensors"), "hf", tmp_path / "back") == ()
    model, said = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "back", output_loading_info=True, dtype=torch.float64
    )
    assert not any(said.values()), said
    back = import_checkpoint(tmp_path / "back")
    assert back.config == imported.config
    assert back.search == imported.search
    assert list(back.weights) == list(imported.weights)
    assert all(same(array, back.weights[name]) for name, array in imported.weights.items())
    assert error_of(back.config, back.weights, theirs_of(model, back.config)[1]) <= EXACT


BEAMS = {"num_beams": 4, "max_length": 24, "renormalize_logits": True, "no_repeat_ngram_size": 3, "length_penalty": 1.2}


# OPUS-MT models are published like this: the file includes the position table, also in float16.
HALF = Form("marian", dtype=torch.float16, pickled=True)


@pytest.mark.parametrize("form", [HALF, *first_alone(FORMS[:8], "formats")], ids=str)
def test_translations_match_transformers(tmp_path, form):
    saved(form, tmp_path / "model")
    generation = tmp_path / "model/generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | BEAMS))
    found = proof.check_against_transformers(tmp_path / "model", import_checkpoint(tmp_path / "model"))
    assert [one.why for one in found if one.verdict != AGREES] == []
    assert found[-1].why == "4 of 4 translations of at most 20 tokens are identical"


def test_vocabulary_is_stored_with_the_weights(tmp_path):
    import transformers

    _, tokenizer, _ = test_vocabularies.marian(tmp_path / "model", vocabulary_files.train())
    size, pad_id = len(tokenizer), tokenizer.pad_token_id
    special = {"vocab_size": size, "pad_token_id": pad_id, "decoder_start_token_id": pad_id}
    saved(Form("marian", special), tmp_path / "model")
    found = import_checkpoint(tmp_path / "model")
    assert set(found.origin.files) >= {"config.json", "model.safetensors", "source.spm", "target.spm", "vocab.json"}
    save(tmp_path / "ours.safetensors", found)
    read = read_trained(tmp_path / "ours.safetensors")
    assert read.search == found.search
    for line in vocabulary_files.LINES[:20:2]:
        assert read.vocabulary.ids(line) == tokenizer(line).input_ids
    export_checkpoint(load(tmp_path / "ours.safetensors"), "hf", tmp_path / "back")
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back(vocabulary_files.LINES[0]).input_ids == tokenizer(vocabulary_files.LINES[0]).input_ids


def test_missing_output_layer_and_bias_get_the_transformers_defaults(tmp_path):
    """facebook/bart-base is published like this."""
    model = saved(Form("bart"), tmp_path / "whole")
    model.model.float().save_pretrained(tmp_path / "bare")
    whole, bare = import_checkpoint(tmp_path / "whole"), import_checkpoint(tmp_path / "bare")
    assert bare.config == whole.config
    assert "final_logits_bias is missing and is set to zero, as in transformers" in bare.notes
    for name, array in whole.weights.items():
        assert same(array, bare.weights[name]) or name == "output_proj.bias"
    assert not bare.weights["output_proj.bias"].any()


def test_license_and_read_files_are_stored_in_the_origin(directory, tmp_path):
    (directory / "README.md").write_text("---\nlanguage: en\nlicense: cc-by-4.0\n---\nlicense: not this\n")
    found = import_checkpoint(directory)
    save(tmp_path / "ours.safetensors", found)
    origin = load(tmp_path / "ours.safetensors").origin
    assert origin == found.origin
    assert (origin.format, origin.family, origin.preset, origin.license) == ("hf", "marian", "marian", "cc-by-4.0")
    assert set(origin.files) >= {"config.json", "generation_config.json", "model.safetensors"}


def test_import_command_verifies_the_imported_model(directory, tmp_path, capsys):
    out = ["--out", str(tmp_path / "a.safetensors"), "--json", str(tmp_path / "a.json")]
    assert main(["import", str(directory), *out, "--backends", "numpy,torch", "--check"]) == 0
    said = capsys.readouterr().out
    for part in (
        "marian",
        "source embedding, target embedding, and output projection",
        "4 of 4 translations",
        "AGREE  numpy, torch, trans",
    ):
        assert part in said
    found = json.loads((tmp_path / "a.json").read_text())["result"]
    assert [one["name"].split()[0] for one in found["proof"]] == [*["numpy"] * 2, *["torch"] * 2, *["transformers"] * 3]
    assert all(one["error"] <= one["allowed"] for one in found["proof"])
    assert main(["export", str(tmp_path / "a.safetensors"), "--format", "hf", "--out", str(tmp_path / "back")]) == 0
    assert "config.json" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "back")]) == 0
    assert "No file was written. To convert the checkpoint, add --out FILE." in capsys.readouterr().out


def test_wrong_import_is_detected_by_the_check(directory, tmp_path, capsys, monkeypatch):
    import transformers

    # This is Marian's own epsilon, which transformers doesn't use.
    monkeypatch.setitem(ref.PRESETS["marian"], "layer_norm_epsilon", 1e-6)
    out = ["--out", str(tmp_path / "a.safetensors"), "--backends", "numpy"]
    assert main(["import", str(directory), *out, "--check"]) == 1
    assert capsys.readouterr().out.endswith(f"DIVERGE  transformers {transformers.__version__}\n")


def test_check_without_transformers_reports_not_checked(directory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(proof, "find_spec", lambda name: None)
    assert main(["import", str(directory), "--check"]) == 3
    assert "NOT CHECKED: not installed: torch, transformers" in " ".join(capsys.readouterr().out.split())
