"""``parity translate`` with other people's vocabularies and searches: what ``generate`` and ``decode`` say."""

from __future__ import annotations

import pytest
import third_party
from conftest import random_weights, tiny_config
from test_vocabularies import LINES, marian, nllb, train

import reference_numpy as ref
from reference_numpy.files import VocabularyFiles
from transformer_parity.cli.main import main
from transformer_parity.ports.generation import generation_search
from transformer_parity.text.kinds import read_vocabulary_folder

TEXT = LINES[:200:2]  # English; the file in between is German
OPUS = {"num_beams": 4, "max_length": 16, "forced_eos_token_id": 0, "renormalize_logits": True, "early_stopping": False}
NLLB = {"num_beams": 3, "max_length": 12, "early_stopping": True}
COMPILED = pytest.mark.extended("translations", "jax", "tf")


def save(path, config, weights, ours, fields):
    """Write what an import would write."""
    notes = {"search": generation_search(fields, config).to_dict(), "origin": {"format": "hf"}}
    ref.save_weights(path, config, weights, None, VocabularyFiles(ours.kind, ours.files()), notes)


@pytest.fixture(scope="module")
def opus(tmp_path_factory):
    """Return a weight file of a tiny Marian model, and what Hugging Face says to the text."""
    folder = tmp_path_factory.mktemp("opus")
    _, tokenizer, _ = marian(folder / "hf", train())
    ours = read_vocabulary_folder(folder / "hf", "marian", {"vocab_size": len(tokenizer)})
    size, pad_id = len(tokenizer), tokenizer.pad_token_id
    ids = {"pad_id": pad_id, "bos_id": pad_id, "eos_id": tokenizer.eos_token_id}
    config = tiny_config("marian", max_length=256, source_vocab_size=size, target_vocab_size=size, **ids)
    weights = random_weights(config, 4)
    weights["output_proj.bias"] = weights["output_proj.bias"] * 4  # tied tables make a model repeat itself
    weights["source_embedding.table"] = weights["source_embedding.table"] * 3
    weights["output_proj.bias"][config.eos_id] += 6.0
    fields = {**OPUS, "bad_words_ids": [[pad_id]], "decoder_start_token_id": pad_id}
    save(folder / "model", config, weights, ours, fields)
    source = tokenizer(TEXT, padding=True, return_tensors="np").input_ids
    found, _ = third_party.marian_generate(config, weights, source, fields)
    return folder / "model", tokenizer.batch_decode(found[:, 0], skip_special_tokens=True)


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory):
    """Return a weight file of a tiny NLLB model, and what Hugging Face says to the text from English into German."""
    import torch

    folder = tmp_path_factory.mktemp("nllb")
    _, tokenizer, direction = nllb(folder / "hf", train("bpe"))
    ours = read_vocabulary_folder(folder / "hf", "m2m_100", {"vocab_size": len(tokenizer)})
    sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), len(tokenizer))
    forms = {"norm_position": "pre", "final_norm": True, "tie_embeddings": "all"}
    config = tiny_config("fairseq", max_length=256, **forms, **sizes)
    weights = random_weights(config, 5)
    fields = {**NLLB, "decoder_start_token_id": config.bos_id}
    save(folder / "model", config, weights, ours, fields)
    model = third_party.m2m_100_model(config, weights)
    found = model.generate(
        **tokenizer(TEXT, padding=True, return_tensors="pt"),
        forced_bos_token_id=tokenizer.convert_tokens_to_ids(direction[1]),
        **fields,
    )
    assert isinstance(found, torch.Tensor)
    return folder / "model", tokenizer.batch_decode(found, skip_special_tokens=True), direction


def translate(capfd, model, lines, *options):
    """Return the exit code, the translations and what was said."""
    path = model.with_name("lines")
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    code = main(["translate", "--weights", str(model), "--dtype", "float64", *map(str, options), str(path)])
    captured = capfd.readouterr()
    return code, captured.out.split("\n")[:-1], captured.err


@COMPILED
def test_marian_says_what_hugging_face_says(opus, capfd, backend):
    model, expected = opus
    assert len(set(expected)) > 30
    assert translate(capfd, model, TEXT, "--backend", backend.name) == (0, expected, "")


@COMPILED
def test_nllb_says_what_hugging_face_says(multilingual, capfd, backend):
    model, expected, (source, target) = multilingual
    assert len(set(expected)) > 30
    asked = ("--from", source, "--to", target)
    assert translate(capfd, model, TEXT, "--backend", backend.name, *asked) == (0, expected, "")
