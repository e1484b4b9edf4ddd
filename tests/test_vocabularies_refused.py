"""Rejected vocabulary files: malformed, too large, or incomplete files, and vocabularies built from no data."""

import json
import sys

import pytest
import tokenizers
from conftest import tiny_config
from vocabulary_files import marian_files, train, write

from transformer_parity.apps.text import maps
from transformer_parity.apps.text.kinds import KINDS, build_vocabulary, read_vocabulary_directory
from transformer_parity.apps.text.maps import read_map
from transformer_parity.apps.text.marian import read_marian_vocabulary
from transformer_parity.engine.system.errors import UsageError
from transformer_spec.files import VocabularyFiles


@pytest.fixture(scope="module")
def unigram():
    return train()


# Malformed and unsupported files
ODD_TABLES = {
    "gap": ('{"a": 0, "b": 2}', "the ID of 'b' in vocab.json must be below 2: got 2"),
    "twice": ('{"a": 0, "b": 0}', "assigns the ID 0 to both 'a' and 'b'"),
    "one name": ('{"a": 0, "b": 1, "a": 1}', "is not valid JSON: duplicate key 'a'"),
    "negative": ('{"a": -1}', "must be a nonnegative integer: got -1"),
    "not a number": ('{"a": true}', "must be a nonnegative integer: got True"),
    "a float": ('{"a": 0.0}', "must be a nonnegative integer: got 0.0"),
    "huge": ('{"a": 1' + "0" * 30 + "}", "the ID of 'a' in vocab.json must be below 1: got 1,000"),
    "a list": ("[1]", "must contain a JSON object: got list"),
    "nothing": ("{}", "contains no pieces"),
    "not JSON": ("{", "is not valid JSON"),
    "deep": ("[" * 100_000, "is not valid JSON"),
    "not text": ("\udcff{", "is not valid JSON"),
}


@pytest.mark.parametrize(("content", "message"), ODD_TABLES.values(), ids=ODD_TABLES)
def test_malformed_vocabulary_tables_are_rejected(content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_map({"vocab.json": content.encode(errors="surrogateescape")}, "vocab.json")
    assert "vocab.json" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: x\n", "line 1 of vocab.yml must be `piece: id`: got 'a: x'"),
        (b"a: 0\nb\n", "line 2 of vocab.yml must be"),
        (b"a: 0\na: 1\n", "duplicate piece 'a' in vocab.yml"),
        (b"\xff: 0\n", "is not valid UTF-8"),
    ],
)
def test_malformed_yml_table_lines_are_rejected(content, message):
    with pytest.raises(ValueError, match=message):
        read_map({"vocab.yml": content}, "vocab.yml")


def test_oversized_vocabulary_files_are_rejected(tmp_path, monkeypatch, unigram):
    directory = write(tmp_path / "model", marian_files(unigram))
    monkeypatch.setattr(maps, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="has more than 1,000 bytes"):
        read_vocabulary_directory(directory, "marian", {})


def test_missing_vocabulary_files_are_named_in_the_error(tmp_path, unigram):
    files = marian_files(unigram)
    for family, message in {
        "marian": "a complete Marian vocabulary: it must contain source.spm and target.spm and vocab.json",
        "bart": "a complete Bart vocabulary: it must contain tokenizer.json, or vocab.json and merges.txt",
        "mt5": "a complete T5 vocabulary: it must contain tokenizer.json, or spiece.model",
        "umt5": "the family of the vocabulary in .* must be one of marian, .*: got umt5",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_vocabulary_directory(write(tmp_path / "empty", {}), family, {})
    with pytest.raises(ValueError, match=r"^target.spm is not a sentencepiece model"):
        read_vocabulary_directory(write(tmp_path / "model", files | {"target.spm": b"none"}), "marian", {})
    write(tmp_path / "model", files | {"vocab.json": b'{"</s>": 0}'})
    with pytest.raises(ValueError, match=r"must contain <unk>$"):
        read_vocabulary_directory(tmp_path / "model", "marian", {})


def test_ids_outside_the_model_vocabulary_are_rejected(tmp_path, unigram):
    files = marian_files(unigram)
    directory, size = write(tmp_path / "model", files), len(files["vocab.json"])
    for fields, has, side in (
        ({"vocab_size": size - 1}, size - 1, "source"),
        ({"vocab_size": size, "decoder_vocab_size": 9}, 9, "target"),
    ):
        with pytest.raises(
            ValueError, match=f"the {side} vocabulary must have at most {has} IDs, as many as the model: got {size}"
        ):
            read_vocabulary_directory(directory, "marian", fields)
    ours = read_vocabulary_directory(directory, "marian", {"vocab_size": size})
    with pytest.raises(
        ValueError, match=f"the source vocabulary must have at most 41 IDs, as many as the model: got {size}"
    ):
        build_vocabulary(
            VocabularyFiles(ours.kind, ours.files()), tiny_config(source_vocab_size=41, target_vocab_size=41)
        )


NOT_SPECIAL = {"content": "<task>", "special": False}
T5_SETTINGS = {
    "a number of sentinels": (
        {"extra_ids": -1},
        "^extra_ids in .* must be an integer in .*: got -1",
    ),
    "text as number": ({"extra_ids": "9"}, "must be an integer in .*: got '9'"),
    "an ordinary added token": (
        {"added_tokens_decoder": {"400": NOT_SPECIAL}},
        "^the added token '<task>' is not special; save the tokenizer with transformers, which writes tokenizer.json$",
    ),
    "an ID": ({"added_tokens_decoder": {"-4": NOT_SPECIAL}}, "must map IDs to tokens: got '-4'"),
    "no token": ({"added_tokens_decoder": {"400": "a"}}, "must map IDs to tokens: got '400'"),
    "EOS": ({"eos_token": {"content": "<end>"}}, "^spiece.model must contain <end>$"),
}


@pytest.mark.parametrize("what", T5_SETTINGS)
def test_unsupported_t5_settings_are_rejected(tmp_path, unigram, what):
    settings, message = T5_SETTINGS[what]
    directory = write(tmp_path / "model", {"spiece.model": unigram, "tokenizer_config.json": settings})
    with pytest.raises(ValueError, match=message):
        read_vocabulary_directory(directory, "t5", {})


def test_t5_tokens_without_settings_are_rejected(tmp_path, unigram):
    directory = write(tmp_path / "model", {"spiece.model": unigram, "added_tokens.json": {"<task>": 400}})
    with pytest.raises(ValueError, match=r"^added_tokens.json is not supported; save the tokenizer with transformers"):
        read_vocabulary_directory(directory, "t5", {})


@pytest.mark.parametrize("kind", [*KINDS, "klingon"])
def test_vocabulary_without_valid_files_raises_value_error(kind):
    with pytest.raises(ValueError, match="vocabulary"):
        build_vocabulary(VocabularyFiles(kind, {"a": b""}), tiny_config())


PANIC = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "normalizer": {"type": "Precompiled"}}
PANIC["normalizer"]["precompiled_charsmap"] = "!"  # invalid base64, for which `tokenizers` panics


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": {"type": "BPE"}}', json.dumps(PANIC).encode()])
def test_invalid_tokenizer_json_raises_value_error(content):
    with pytest.raises(ValueError, match=r"^tokenizer.json cannot be used"):
        build_vocabulary(VocabularyFiles("tokenizer", {"tokenizer.json": content}), tiny_config())


def test_template_with_too_many_symbols_is_rejected_without_using_memory():
    content = b"[" + b'{"SpecialToken":{"id":"a","type_id":0}},' * 10**6 + b"]"
    with pytest.raises(ValueError, match=r"^tokenizer.json must add at most 1,000 tokens to a line: got 1,000,000"):
        build_vocabulary(VocabularyFiles("tokenizer", {"tokenizer.json": content}), tiny_config())


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_exponentially_growing_replacements_are_rejected(part):
    """Forty of these replacements turn one letter into a terabyte."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    component = tokenizers.normalizers if part == "normalizer" else tokenizers.decoders
    setattr(tokenizer, part, component.Sequence([component.Replace("a", "aa")] * 40))
    message = r"^tokenizer.json cannot be used: the replacements must lengthen a text by at most 64 times: got 1.1e\+12"
    with pytest.raises(ValueError, match=message):
        build_vocabulary(VocabularyFiles("tokenizer", {"tokenizer.json": tokenizer.to_str().encode()}), tiny_config())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.spm", "b.spm", "c.spm"], "at most two .spm files: got 3"),
        (["a.txt"], "must end in .spm, .model, .yml, or .json: got a.txt"),
        (["a.yml", "b.json"], "must have the same format: got .yml and .json"),
    ],
)
def test_marian_vocabulary_paths_of_unknown_forms_are_rejected(tmp_path, names, message):
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        read_marian_vocabulary(paths)


def test_missing_tokenizers_package_is_named_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        UsageError, match=r"^this vocabulary requires tokenizers: pip install 'transformer-parity\[import\]'$"
    ):
        build_vocabulary(VocabularyFiles("tokenizer", {"tokenizer.json": b"{}"}), tiny_config())


def test_only_vocabulary_files_of_its_kind_are_read(tmp_path, unigram):
    """Files of other vocabulary kinds are ignored, and only a vocabulary's own files are stored with the weights."""
    directory = write(tmp_path / "model", marian_files(unigram) | {"tokenizer.json": b"{}", "merges.txt": b"a b"})
    ours = read_vocabulary_directory(directory, "marian", {})
    assert set(ours.files()) == {"source.spm", "target.spm", "vocab.json", "tokenizer_config.json"}
