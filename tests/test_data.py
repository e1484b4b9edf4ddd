"""Training data: vocabularies and decoding, generated dates, and batches and their order."""

import gzip
import itertools
import re
from collections import Counter
from datetime import date

import numpy as np
import pytest
from conftest import tiny_config

from transformer_parity.apps.text.dates import (
    FIRST,
    FORMATS,
    LANGUAGES,
    LAST,
    date_lines,
    date_pairs,
    is_held_out,
    write,
)
from transformer_parity.apps.train.batches import Batches, number
from transformer_parity.transformer.sentences import pairs
from transformer_parity.transformer.sentences.pairs import read_pairs
from transformer_parity.transformer.sentences.subwords import Subwords
from transformer_parity.transformer.sentences.vocabulary import LONGEST, pad

# Each preset has different special IDs.
PRESETS = ["paper_base", "t2t_2017", "annotated", "marian", "fairseq", "flax_wmt"]


def config_for(vocabulary, preset="paper_base", **special_ids):
    size = vocabulary.size + 3
    return tiny_config(preset, source_vocab_size=size, target_vocab_size=size, **special_ids)


# Vocabularies
@pytest.fixture(scope="module")
def sentences():
    return [line for pair in read_pairs() for line in pair]


@pytest.fixture(scope="module", params=["unigram", "char"])
def vocabulary(request, sentences):
    return Subwords.train(sentences, 400, request.param)


@pytest.mark.parametrize("preset", PRESETS)
def test_ids_decode_to_the_original_text(vocabulary, sentences, preset):
    config = config_for(vocabulary, preset)
    numbered = vocabulary.numbered(config)
    for line in sentences[:300]:
        ids = numbered.ids(line)
        assert numbered.target_ids(line) == ids
        assert ids[-1] == config.eos_id
        assert numbered.text(ids) == line
        assert numbered.text(ids[:-1]) == line
        assert numbered.text([config.bos_id, *ids]) == line
        assert numbered.text(np.array([config.bos_id, *ids, *[config.pad_id] * 3, ids[0]], np.int32)) == line


def test_subword_ids_leave_room_for_any_special_ids(vocabulary, sentences):
    config = config_for(vocabulary, pad_id=17, bos_id=vocabulary.size + 2, eos_id=4)
    numbered = vocabulary.numbered(config)
    used = {token for line in sentences for token in numbered.ids(line)[:-1]}
    assert not used & {config.pad_id, config.bos_id, config.eos_id}
    assert {3, 5, 16, 18} <= used
    assert [numbered.text(numbered.ids(line)) for line in sentences] == sentences


def test_decoded_text_is_exact_up_to_normalization(vocabulary):
    config = config_for(vocabulary)
    vocabulary = vocabulary.numbered(config)
    assert vocabulary.text(vocabulary.ids("  \uff37here \t is   it? ")) == "Where is it?"
    assert vocabulary.text([]) == ""
    assert vocabulary.text([config.eos_id, 5]) == ""
    first, *rest = vocabulary.ids("Where is it?")
    assert vocabulary.text([first, config.bos_id, config.pad_id, *rest]) == "Where is it?"


@pytest.mark.parametrize("preset", PRESETS)
def test_unknown_characters_and_ids_are_encoded_and_decoded(vocabulary, preset):
    size = vocabulary.size + 9  # a model with more IDs than the vocabulary has subwords
    config = tiny_config(preset, source_vocab_size=size, target_vocab_size=size)
    vocabulary = vocabulary.numbered(config)
    ids = vocabulary.ids("Wo ist 漢?")
    assert vocabulary.text(ids).startswith("Wo ist ")
    assert "⁇" in vocabulary.text(ids)
    for token in (*range(size), size + 100, -1):
        vocabulary.text([token, *ids])
    assert "⁇" in vocabulary.text([size - 1])


def test_character_vocabulary_contains_every_character():
    lines = ["aaaa bbbb aaaa", "aaaa Übär"]
    vocabulary = Subwords.train(lines, 8, "char")  # a, b, r, ä, Ü, the space, and the unknown token
    assert vocabulary.size == 7
    assert vocabulary.pieces("Ürb ab") == ["Ü", "r", "b", "▁", "a", "b"]
    with pytest.raises(ValueError, match="6 subwords are too few for this text: it needs 7"):
        Subwords.train(lines, 6, "char")


def test_vocabulary_is_rebuilt_from_its_model(vocabulary, sentences):
    again = Subwords(vocabulary.model)
    assert again.model == vocabulary.model
    assert (again.size, again.pieces(sentences[0])) == (vocabulary.size, vocabulary.pieces(sentences[0]))


def test_vocabulary_training_is_deterministic(sentences):
    assert Subwords.train(sentences, 400).model == Subwords.train(iter(sentences), 400).model


@pytest.mark.parametrize("model", [b"", b"no model"])
def test_invalid_vocabulary_model_raises_value_error(model):
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        Subwords(model)


def test_unknown_vocabulary_kind_is_rejected():
    with pytest.raises(ValueError, match="kind must be one of unigram, char: got 'bpe'"):
        Subwords.train(["a"], kind="bpe")


# Dates
@pytest.fixture(scope="module")
def dates():
    return date_pairs(200_000, 0, held_out=False)


@pytest.fixture(scope="module")
def held_out_dates():
    return date_pairs(20_000, 0, held_out=True)


@pytest.mark.parametrize(
    ("day", "language", "template", "written"),
    [
        (date(2004, 5, 3), "numbers", "{d}.{m}.{yy}", "3.5.04"),
        (date(2004, 5, 3), "numbers", "{mm}/{dd}/{year}", "05/03/2004"),
        (date(1984, 2, 22), "English", "{weekday}, {month} {d}, {year}", "Wednesday, February 22, 1984"),
        (date(1984, 2, 22), "English", "the {ordinal} of {month} {year}", "the 22nd of February 1984"),
        (date(2011, 11, 11), "English", "{month} {ordinal}, {year}", "November 11th, 2011"),
        (date(2000, 12, 31), "English", "the {day_words} of {month} {year}", "the thirty-first of December 2000"),
        (date(1999, 10, 30), "German", "der {day_words} {month} {year}", "der dreißigste Oktober 1999"),
        (date(1989, 11, 9), "German", "{weekday}, den {ordinal} {month} {year}", "Donnerstag, den 9. November 1989"),
        (date(1789 + 200, 7, 14), "French", "{weekday} {ordinal} {month} {year}", "vendredi 14 juillet 1989"),
        (date(2024, 8, 1), "French", "le {ordinal} {month} {year}", "le 1er août 2024"),
        (date(2024, 8, 21), "French", "le {day_words} {month} {year}", "le vingt et un août 2024"),
        (date(2024, 3, 5), "Spanish", "{weekday}, {d} de {month} de {year}", "martes, 5 de marzo de 2024"),
        (date(2024, 3, 5), "Portuguese", "{d} de {month} de {year}", "5 de março de 2024"),
    ],
)
def test_date_is_written_in_the_given_format(day, language, template, written):
    assert template in FORMATS[language]
    assert write(day, language, template) == written


@pytest.mark.parametrize(
    ("year", "words"),
    [
        (1900, "nineteen hundred"),
        (1905, "nineteen oh five"),
        (1984, "nineteen eighty-four"),
        (2000, "two thousand"),
        (2004, "two thousand and four"),
        (2010, "twenty ten"),
        (2099, "twenty ninety-nine"),
    ],
)
def test_year_is_written_in_words(year, words):
    assert write(date(year, 5, 3), "English", "the {day_words} of {month} {year_words}") == f"the third of May {words}"


def test_words_of_each_language_are_distinct():
    for name, language in LANGUAGES.items():
        for field, words in vars(language).items():
            assert len({word.casefold() for word in words}) == len(words), (name, field)
            needed = 12 if "month" in field else 7 if "weekday" in field else 31
            # A language without its own words for a field uses 31 numbers.
            assert len(words) in (needed, 31), (name, field)
    assert sum(map(len, FORMATS.values())) >= 28
    assert FORMATS.keys() == LANGUAGES.keys()


def test_every_date_string_has_one_correct_answer(dates, held_out_dates):
    answers = {}
    for source, target in dates + held_out_dates:
        plain = "".join(source.casefold().split())  # removes at least as much as any normalization could
        assert answers.setdefault(plain, target) == target, source


def test_every_format_distinguishes_different_days():
    days = [date.fromordinal(n) for n in range(date(1970, 1, 1).toordinal(), date(2070, 1, 1).toordinal(), 11)]
    answers = {}
    for (language, templates), day in itertools.product(FORMATS.items(), days):
        for template in templates:
            line = "".join(write(day, language, template).casefold().split())
            assert answers.setdefault(line, day) == day, line


def test_two_digit_year_is_between_1970_and_2069(dates):
    two_digits = [
        (source, target) for source, target in dates if re.search(r"\d ?$", source) and not re.search(r"\d{4}", source)
    ]
    assert len(two_digits) > 10_000
    years = {int(target[:4]) for _, target in two_digits}
    assert (min(years), max(years)) == (1970, 2069)


def test_every_format_and_noise_occurs(dates):
    lines = {source for source, _ in dates}
    for sought in ("2004", "May", "MAI", "mai", "dritte", "troisième|trois", " de ", "maggio", "maart", "março", "  "):
        assert any(re.search(sought, line) for line in lines), sought
    assert {target[:4] for _, target in dates} == {str(year) for year in range(1900, 2100)}
    assert {target[5:7] for _, target in dates} == {f"{month:02}" for month in range(1, 13)}


def test_held_out_days_are_selected_by_content(dates, held_out_dates):
    trained, held_out = ({target for _, target in pairs} for pairs in (dates, held_out_dates))
    assert not trained & held_out
    assert all(is_held_out(date.fromisoformat(day)) for day in held_out)
    days = [date.fromordinal(n) for n in range(FIRST.toordinal(), LAST.toordinal() + 1)]
    share = Counter(map(is_held_out, days))[True] / len(days)
    assert 0.09 < share < 0.11
    for part in (lambda day: day.day, lambda day: day.month, lambda day: day.year, lambda day: day.weekday()):
        assert {part(day) for day in days if is_held_out(day)} == set(map(part, days))
    # This must never change, because a published model must not have been trained on a held-out date.
    assert is_held_out(date(1900, 1, 16))
    assert not is_held_out(date(2000, 1, 1))


def test_dates_depend_only_on_the_seed(dates):
    assert date_pairs(50, 0, held_out=False) == dates[:50]
    assert date_pairs(50, 1, held_out=False) != dates[:50]
    for count in (0, -1):
        with pytest.raises(ValueError, match="count must be at least 1"):
            date_pairs(count, 0, held_out=False)


def test_date_lines_contain_every_character(dates, held_out_dates):
    characters = set("".join(date_lines()))
    assert set("".join(line for pair in dates + held_out_dates for line in pair)) <= characters
    subwords = Subwords.train(date_lines(), kind="char")
    vocabulary = subwords.numbered(config_for(subwords))
    for source, target in held_out_dates[:2000]:
        assert vocabulary.text(vocabulary.ids(source)) == " ".join(source.split())
        assert vocabulary.text(vocabulary.ids(target)) == target
        assert len(vocabulary.ids(target)) == 11


def test_lines_end_only_at_newlines(tmp_path):
    """If a carriage return ended a line, all later pairs would be misaligned, in training as well as in translation."""
    text = "a\rb\x0bc\u2028d\x85e\r\nf\n"
    (tmp_path / "a").write_bytes(text.encode())
    (tmp_path / "b.gz").write_bytes(gzip.compress(text.encode()))
    assert read_pairs(tmp_path / "a", tmp_path / "b.gz") == [("a\rb\x0bc\u2028d\x85e",) * 2, ("f", "f")]


def test_encoding_error_names_the_file_and_line(tmp_path):
    (tmp_path / "a").write_bytes(b"a\rb\nc\n\xe4\n")
    with pytest.raises(ValueError, match=r"a is not valid UTF-8 in line 3: .* byte 0xe4"):
        read_pairs(tmp_path / "a", tmp_path / "a")


def test_sentence_over_the_token_limit_is_dropped_or_rejected(vocabulary):
    config = config_for(vocabulary)
    numbered = number([("a b " * 250_000, "a"), ("a", "b")], vocabulary.numbered(config))
    assert len(numbered[0][0]) > 100_000
    assert Batches(numbered, config, 100, max_length=LONGEST).dropped == 1
    with pytest.raises(ValueError, match=r"a sentence must have at most 4,096 tokens: got [\d,]+"):
        pad([ids for ids, _ in numbered], config)


def test_excessive_vocabulary_size_is_rejected_immediately():
    with pytest.raises(ValueError, match="at most 1,114,112 entries: got 1,000,000,000,000"):
        Subwords.train(["a b"], 10**12)


def test_numbered_pairs_decode_to_the_original_text(sentences):
    vocabulary = Subwords.train(sentences, 400)
    config = config_for(vocabulary)
    pairs = read_pairs()[:50]
    vocabulary = vocabulary.numbered(config)
    numbered = number(pairs, vocabulary)
    for (source, target), (source_ids, target_ids) in zip(pairs, numbered, strict=True):
        assert source_ids[-1] == target_ids[-1] == config.eos_id
        assert config.bos_id not in [*source_ids, *target_ids]
        assert (vocabulary.text(source_ids), vocabulary.text(target_ids)) == (source, target)
    assert Batches(numbered, config, 200).padding < 0.35


def test_line_over_the_size_limit_is_rejected_with_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "MOST_BYTES", 100)
    path = tmp_path / "long.txt"
    path.write_bytes(b"a\n" + b"b" * 99 + b"\n")
    assert [len(line) for line, _ in read_pairs(path, path)] == [1, 99]
    path.write_bytes(b"a\n" + bytes(1000))
    with pytest.raises(ValueError, match=f"^line 2 of {re.escape(str(path))} must be at most "):
        read_pairs(path, path)
