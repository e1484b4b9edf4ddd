"""``parity translate`` returns the same translations as Hugging Face's ``generate`` and ``decode``."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import third_party
from conftest import random_weights, tiny_config
from test_vocabularies import marian, nllb
from vocabulary_files import LINES, train

import reference_numpy as ref
from transformer_parity.apps.checkpoints.formats.huggingface_search import generation_search
from transformer_parity.apps.figures.attention import Asked, draw_attention
from transformer_parity.apps.text.kinds import read_vocabulary_directory
from transformer_parity.apps.translate.lines import Line
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.cli.main import main
from transformer_spec.files import VocabularyFiles
from transformer_spec.search import Search

TEXT = LINES[:200:2]  # the English lines; the lines between them are German
OPUS = {"num_beams": 4, "max_length": 16, "forced_eos_token_id": 0, "renormalize_logits": True, "early_stopping": False}
NLLB = {"num_beams": 3, "max_length": 12, "early_stopping": True}
COMPILED = pytest.mark.extended("translations", "jax", "tf")


def save(path, config, weights, ours, fields):
    """Write the weight file that an import would write."""
    notes = {"search": generation_search(fields, config).to_dict(), "origin": {"format": "hf"}}
    ref.save_weights(path, config, weights, None, VocabularyFiles(ours.kind, ours.files()), notes)


@pytest.fixture(scope="module")
def opus(tmp_path_factory):
    """Return a weight file of a tiny Marian model, and Hugging Face's translations of the text."""
    directory = tmp_path_factory.mktemp("opus")
    _, tokenizer, _ = marian(directory / "hf", train())
    ours = read_vocabulary_directory(directory / "hf", "marian", {"vocab_size": len(tokenizer)})
    size, pad_id = len(tokenizer), tokenizer.pad_token_id
    ids = {"pad_id": pad_id, "bos_id": pad_id, "eos_id": tokenizer.eos_token_id}
    config = tiny_config("marian", max_length=256, source_vocab_size=size, target_vocab_size=size, **ids)
    weights = random_weights(config, 4)
    weights["output_proj.bias"] = weights["output_proj.bias"] * 4  # with tied embeddings, models tend to repeat tokens
    weights["source_embedding.table"] = weights["source_embedding.table"] * 3
    weights["output_proj.bias"][config.eos_id] += 6.0
    fields = {**OPUS, "bad_words_ids": [[pad_id]], "decoder_start_token_id": pad_id}
    save(directory / "model", config, weights, ours, fields)
    source = tokenizer(TEXT, padding=True, return_tensors="np").input_ids
    found, _ = third_party.marian_generate(config, weights, source, fields)
    return directory / "model", tokenizer.batch_decode(found[:, 0], skip_special_tokens=True)


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory):
    """Return a weight file of a tiny NLLB model, and Hugging Face's translations from English into German."""
    directory = tmp_path_factory.mktemp("nllb")
    _, tokenizer, direction = nllb(directory / "hf", train("bpe"))
    ours = read_vocabulary_directory(directory / "hf", "m2m_100", {"vocab_size": len(tokenizer)})
    sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), len(tokenizer))
    config = tiny_config("m2m_100", max_length=256, **sizes)
    weights = random_weights(config, 5)
    fields = {**NLLB, "decoder_start_token_id": config.bos_id}
    save(directory / "model", config, weights, ours, fields)
    model = third_party.hugging_face_model("m2m_100", config, weights)
    found = model.generate(
        **tokenizer(TEXT, padding=True, return_tensors="pt"),
        forced_bos_token_id=tokenizer.convert_tokens_to_ids(direction[1]),
        **fields,
    )
    return directory / "model", tokenizer.batch_decode(found, skip_special_tokens=True), direction


def translate(capfd, model, lines, *options):
    """Return the exit code, the translations, and the messages."""
    path = model.with_name("lines")
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    code = main(["translate", "--weights", str(model), "--dtype", "float64", *map(str, options), str(path)])
    captured = capfd.readouterr()
    return code, captured.out.split("\n")[:-1], captured.err


@COMPILED
def test_marian_translations_match_hugging_face(opus, capfd, backend):
    model, expected = opus
    assert len(set(expected)) > 30
    assert translate(capfd, model, TEXT, "--backend", backend.name) == (0, expected, "")


@COMPILED
def test_nllb_translations_match_hugging_face(multilingual, capfd, backend):
    model, expected, (source, target) = multilingual
    assert len(set(expected)) > 30
    asked = ("--from", source, "--to", target)
    assert translate(capfd, model, TEXT, "--backend", backend.name, *asked) == (0, expected, "")


def by_reference(model, search, lines):
    """Translate each line separately with the reference."""
    trained = read_trained(model)
    loaded = ref.Transformer.from_weights(trained.config, trained.weights, "float64")
    sources = [np.array([trained.vocabulary.ids(line)]) for line in lines]
    return [trained.vocabulary.text(search.run(ref, loaded, source).ids[0]) for source in sources]


def test_command_line_options_override_the_stored_search(opus, capfd):
    model, expected = opus
    search = read_trained(model).search
    assert (search.beam_size, search.max_length, search.rules.stop) == (4, 15, "current")
    lines, said = TEXT[:12], [expected[:12]]
    no_repeats = replace(search, rules=replace(search.rules, no_repeat_ngram_size=1))
    marian_rules = Search.preset("marian", beam_size=4, max_length=9, start_id=search.start_id)
    for asked, meant in (
        (("--beam", 2, "--search", "max_length=6"), replace(search, beam_size=2, max_length=6)),
        (("--search", "length_penalty=3"), replace(search, length_penalty=3.0)),
        (("--search", "rules=marian", "--search", "max_length=9"), marian_rules),
        (("--search", "no_repeat_ngram_size=1"), no_repeats),
    ):
        code, found, _ = translate(capfd, model, lines, "--backend", "numpy", *asked)
        assert (code, found) == (0, by_reference(model, meant, lines))
        said.append(found)
    assert len({tuple(found) for found in said}) == 5
    code, found, _ = translate(capfd, model, lines[:2], "--backend", "numpy", "--nbest", 3)
    assert (code, len(found)) == (0, 6)


def test_blank_lines_stay_blank_and_language_codes_in_text_are_used(opus, capfd):
    model, expected = opus
    code, found, _ = translate(capfd, model, ["", TEXT[0], "  "], "--backend", "numpy")
    assert (code, found) == (0, ["", expected[0], ""])
    told = translate(capfd, model, [f">>deu<<{line}" for line in TEXT[:9]], "--backend", "numpy")
    assert translate(capfd, model, TEXT[:9], "--backend", "numpy", "--to", "deu") == told
    assert told[1] != expected[:9]


def test_line_of_spaces_is_blank_even_if_spaces_have_ids():
    """Byte-level vocabularies assign an ID to each space."""
    assert not Line(1, " \t ", [0, 7, 7, 7, 2], most=99, least=3).can_be_translated
    assert Line(1, " a ", [0, 7, 8, 7, 2], most=99, least=3).can_be_translated


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((), "--from and --to: this vocabulary requires a source language; choose one of ace_Arab, ace_Latn"),
        (("--from", "eng_Latn"), "requires a target language"),
        (("--from", "eng_Latn", "--to", "de"), "has no target language 'de': did you mean deu_Latn"),
    ],
)
def test_unknown_translation_direction_is_rejected(multilingual, capfd, asked, message):
    code, found, said = translate(capfd, multilingual[0], TEXT[:1], "--backend", "numpy", *asked)
    assert (code, found) == (3, [])
    assert message in said


def test_source_language_is_rejected_if_the_vocabulary_has_none(opus, capfd):
    code, found, said = translate(capfd, opus[0], TEXT[:1], "--backend", "numpy", "--from", "eng")
    assert (code, found) == (3, [])
    assert "this vocabulary does not use source language codes: got 'eng'" in said


def test_backends_are_compared_in_a_direction(multilingual, capfd):
    asked = ("--from", "eng_Latn", "--to", "deu_Latn", "--compare", "--backend", "numpy,torch")
    code, found, _ = translate(capfd, multilingual[0], TEXT[:20], *asked)
    assert code == 0
    assert found[-1].startswith("AGREE  numpy, torch in float64, 20 lines: 20 same")


def test_imported_model_is_evaluated_with_its_own_search(multilingual, tmp_path, capfd):
    model, expected, _ = multilingual
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in TEXT[:20]), "utf-8")
    (tmp_path / "target").write_text("".join(f"{line}\n" for line in expected[:20]), "utf-8")
    text = ["--text", str(tmp_path / "source"), str(tmp_path / "target"), "--json", str(tmp_path / "json")]
    direction = ["--from", "eng_Latn", "--to", "deu_Latn"]
    assert main(["evaluate", str(model), "--backend", "numpy", *text, *direction]) == 0
    (found,) = json.loads((tmp_path / "json").read_text("utf-8"))["result"]["evaluations"]
    assert (found["beam"], round(found["BLEU"])) == (3, 100)
    assert "beam 3" in capfd.readouterr().out


def test_invalid_stored_search_is_rejected(tmp_path, opus, capfd):
    trained = read_trained(opus[0])
    files = VocabularyFiles(trained.vocabulary.kind, trained.vocabulary.files())
    for search, message in (({"beam": 4}, "unknown search options: beam"), ({"beam_size": 0}, "beam_size must be")):
        ref.save_weights(tmp_path / "model", trained.config, trained.weights, None, files, {"search": search})
        code, found, said = translate(capfd, tmp_path / "model", TEXT[:1], "--backend", "numpy")
        assert (code, found) == (3, [])
        assert message in said


def test_attention_is_drawn_over_the_pieces_of_the_model(opus):
    figure = draw_attention(Asked(weights=opus[0], source=">>deu<< Hello", target="Hallo"))
    labels = {text.get_text() for axes in figure.axes for text in axes.get_xticklabels()}
    assert {">>deu<<", "</s>"} <= labels
