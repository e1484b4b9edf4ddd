"""The conversion of settings of Hugging Face's `generate` to a search, and settings that no model family supports."""

from __future__ import annotations

import json

import ml_dtypes  # noqa: F401  registers bfloat16
import pytest
from hf_checkpoints import directory as directory  # a fixture

import reference_numpy as ref
from transformer_parity.apps.checkpoints.formats.huggingface_search import generation_search, read_search, write_search
from transformer_parity.apps.checkpoints.importer import import_checkpoint
from transformer_spec.search import Search


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 10**9}, "beam_size in the search settings of a file must be at most 1,000: got 1,000,000,000"),
        (
            {"max_new_tokens": 10**9},
            "max_length in the search settings of a file must be at most 65,536: got 1,000,000,000",
        ),
        (
            {"no_repeat_ngram_size": 10**9},
            "no_repeat_ngram_size in the search settings of a file must be at most 1,000: got",
        ),
        ({"forced_bos_token_id": 31}, r"forced_ids must be in \[0, 31\): got 31"),
        ({"decoder_start_token_id": 31}, r"start_id must be in \[0, 31\): got 31"),
        ({"bad_words_ids": [[31]]}, r"banned_ids must be in \[0, 31\): got 31"),
        ({"bad_words_ids": 5}, "bad_words_ids must be a list: got 5"),
        ({"max_length": [5]}, r"max_length must be an integer: got \[5\]"),
    ],
)
def test_invalid_generation_settings_are_rejected(directory, fields, message):
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        import_checkpoint(directory)


CONFIG = ref.TransformerConfig.preset("marian", source_vocab_size=31, target_vocab_size=31)
SETTINGS = {  # settings of generate, and the search options and rules that they change in the "hf" presets
    "OPUS-MT": (
        {
            "num_beams": 4,
            "max_length": 512,
            "bad_words_ids": [[1]],
            "forced_eos_token_id": 0,
            "renormalize_logits": True,
        },
        {"beam_size": 4, "max_length": 511},
        {"at_limit": "forced", "renormalize": True},
    ),
    "NLLB": (
        {"num_beams": 5, "max_length": 200, "early_stopping": True, "forced_bos_token_id": 7},
        {"beam_size": 5, "max_length": 199},
        {"stop": "first", "forced_ids": (7,)},
    ),
    "new tokens": ({"max_new_tokens": 30, "min_new_tokens": 3}, {"max_length": 30, "min_length": 4}, {}),
    "never": (
        {"num_beams": 2, "early_stopping": "never", "max_length": 9},
        {"beam_size": 2, "max_length": 8},
        {"stop": "attainable"},
    ),
    "summaries": (
        {"num_beams": 4, "length_penalty": 2.0, "min_length": 5, "no_repeat_ngram_size": 3, "max_length": 62},
        {"beam_size": 4, "length_penalty": 2.0, "min_length": 5, "max_length": 61},
        {"no_repeat_ngram_size": 3},
    ),
    "start token and banned tokens": (
        {"decoder_start_token_id": 5, "bad_words_ids": [[1], [9]], "max_length": 20},
        {"start_id": 5, "max_length": 19},
        {"banned_ids": (9,)},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_generate_settings_are_converted_to_a_search(name):
    fields, options, rules = SETTINGS[name]
    found, notes = read_search(fields, CONFIG)
    assert notes == []
    assert found == Search.preset("hf", **options, rules=ref.SearchRules.preset("hf", **rules))
    written, notes = write_search(found, CONFIG)
    assert notes == []
    assert read_search(written, CONFIG) == (found, [])


@pytest.mark.parametrize("beams", [1, 2])
def test_num_hypotheses_is_limited_by_num_beams(beams):
    found = generation_search({"num_beams": beams, "num_return_sequences": 5}, CONFIG)
    assert found.num_hypotheses == beams
    found, _ = read_search({"num_beams": beams, "num_return_sequences": 5}, CONFIG)
    assert (found.beam_size or 1, found.num_hypotheses) == (beams, 1)


def test_settings_that_cannot_be_converted_are_reported():
    _, notes = read_search({"do_sample": True, "repetition_penalty": 1.2, "bad_words_ids": [[3, 4]]}, CONFIG)
    assert [note.split(" ")[0] for note in notes] == ["bad_words_ids", "do_sample", "repetition_penalty", "no"]
    _, notes = write_search(Search(4), CONFIG)
    assert notes == ["`generate` uses different search rules, so its translations may differ when it uses a beam"]
