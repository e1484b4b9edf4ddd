"""What a model is trained on: vocabularies and their inverse, generated dates, batches and their order."""

import gzip
import itertools
import json
import os
import re
import subprocess
import sys
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
from transformer_parity.apps.train import batches
from transformer_parity.apps.train.batches import Batches, number
from transformer_parity.transformer.sentences.pairs import read_pairs
from transformer_parity.transformer.sentences.subwords import Subwords
from transformer_parity.transformer.sentences.vocabulary import LONGEST, pad

PRESETS = ["paper_base", "t2t_2017", "annotated", "marian", "fairseq", "flax_wmt"]  # each with other special ids


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
def test_text_is_the_inverse_of_ids(vocabulary, sentences, preset):
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


def test_subwords_make_room_for_any_special_ids(vocabulary, sentences):
    config = config_for(vocabulary, pad_id=17, bos_id=vocabulary.size + 2, eos_id=4)
    numbered = vocabulary.numbered(config)
    used = {token for line in sentences for token in numbered.ids(line)[:-1]}
    assert not used & {config.pad_id, config.bos_id, config.eos_id}
    assert {3, 5, 16, 18} <= used
    assert [numbered.text(numbered.ids(line)) for line in sentences] == sentences


def test_text_is_exact_up_to_normalisation(vocabulary):
    config = config_for(vocabulary)
    vocabulary = vocabulary.numbered(config)
    assert vocabulary.text(vocabulary.ids("  \uff37here \t is   it? ")) == "Where is it?"
    assert vocabulary.text([]) == ""
    assert vocabulary.text([config.eos_id, 5]) == ""
    first, *rest = vocabulary.ids("Where is it?")
    assert vocabulary.text([first, config.bos_id, config.pad_id, *rest]) == "Where is it?"


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_unknown_is_read_and_written_all_the_same(vocabulary, preset):
    size = vocabulary.size + 9  # a model with more ids than there are subwords
    config = tiny_config(preset, source_vocab_size=size, target_vocab_size=size)
    vocabulary = vocabulary.numbered(config)
    ids = vocabulary.ids("Wo ist 漢?")
    assert vocabulary.text(ids).startswith("Wo ist ")
    assert "⁇" in vocabulary.text(ids)
    for token in (*range(size), size + 100, -1):
        vocabulary.text([token, *ids])
    assert "⁇" in vocabulary.text([size - 1])


def test_a_character_vocabulary_holds_every_character():
    lines = ["aaaa bbbb aaaa", "aaaa Übär"]
    vocabulary = Subwords.train(lines, 8, "char")  # a b r ä Ü, the space, and unknown
    assert vocabulary.size == 7
    assert vocabulary.pieces("Ürb ab") == ["Ü", "r", "b", "▁", "a", "b"]
    with pytest.raises(ValueError, match="6 subwords are too few for this text: it needs 7"):
        Subwords.train(lines, 6, "char")


def test_a_vocabulary_is_rebuilt_from_its_model(vocabulary, sentences):
    again = Subwords(vocabulary.model)
    assert again.model == vocabulary.model
    assert (again.size, again.pieces(sentences[0])) == (vocabulary.size, vocabulary.pieces(sentences[0]))


def test_a_vocabulary_is_learned_the_same_again(sentences):
    assert Subwords.train(sentences, 400).model == Subwords.train(iter(sentences), 400).model


@pytest.mark.parametrize("model", [b"", b"no model"])
def test_no_vocabulary_from_other_bytes(model):
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        Subwords(model)


def test_kinds_of_vocabulary():
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
def test_a_date_as_people_write_it(day, language, template, written):
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
def test_a_year_in_words(year, words):
    assert write(date(year, 5, 3), "English", "the {day_words} of {month} {year_words}") == f"the third of May {words}"


def test_the_words_of_a_language_are_all_different():
    for name, language in LANGUAGES.items():
        for field, words in vars(language).items():
            assert len({word.casefold() for word in words}) == len(words), (name, field)
            needed = 12 if "month" in field else 7 if "weekday" in field else 31
            assert len(words) in (needed, 31), (name, field)  # 31 are numbers, where a language is without its own
    assert sum(map(len, FORMATS.values())) >= 28
    assert FORMATS.keys() == LANGUAGES.keys()


def test_every_string_has_one_right_answer(dates, held_out_dates):
    answers = {}
    for source, target in dates + held_out_dates:
        plain = "".join(source.casefold().split())  # as much as any normalisation could take away
        assert answers.setdefault(plain, target) == target, source


def test_every_format_writes_different_days_differently():
    days = [date.fromordinal(n) for n in range(date(1970, 1, 1).toordinal(), date(2070, 1, 1).toordinal(), 11)]
    answers = {}
    for (language, templates), day in itertools.product(FORMATS.items(), days):
        for template in templates:
            line = "".join(write(day, language, template).casefold().split())
            assert answers.setdefault(line, day) == day, line


def test_two_digits_mean_a_year_from_1970_to_2069(dates):
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


def test_days_are_held_out_by_content(dates, held_out_dates):
    trained, held_out = ({target for _, target in pairs} for pairs in (dates, held_out_dates))
    assert not trained & held_out
    assert all(is_held_out(date.fromisoformat(day)) for day in held_out)
    days = [date.fromordinal(n) for n in range(FIRST.toordinal(), LAST.toordinal() + 1)]
    share = Counter(map(is_held_out, days))[True] / len(days)
    assert 0.09 < share < 0.11
    for part in (lambda day: day.day, lambda day: day.month, lambda day: day.year, lambda day: day.weekday()):
        assert {part(day) for day in days if is_held_out(day)} == set(map(part, days))
    assert is_held_out(date(1900, 1, 16))  # for ever: a model that is published must not find it was trained on
    assert not is_held_out(date(2000, 1, 1))


def test_dates_depend_on_the_seed_only(dates):
    assert date_pairs(50, 0, held_out=False) == dates[:50]
    assert date_pairs(50, 1, held_out=False) != dates[:50]
    for count in (0, -1):
        with pytest.raises(ValueError, match="count must be at least 1"):
            date_pairs(count, 0, held_out=False)


def test_date_lines_hold_every_character(dates, held_out_dates):
    characters = set("".join(date_lines()))
    assert set("".join(line for pair in dates + held_out_dates for line in pair)) <= characters
    subwords = Subwords.train(date_lines(), kind="char")
    vocabulary = subwords.numbered(config_for(subwords))
    for source, target in held_out_dates[:2000]:
        assert vocabulary.text(vocabulary.ids(source)) == " ".join(source.split())
        assert vocabulary.text(vocabulary.ids(target)) == target
        assert len(vocabulary.ids(target)) == 11


# Batches


CONFIG = tiny_config(pad_id=3, bos_id=1, eos_id=2)


def corpus(count=500, longest=25, seed=0):
    """Return numbered pairs that are all different, short ones the most frequent."""
    rng = np.random.default_rng(seed)
    pairs = []
    for index in range(count):
        lengths = np.clip(rng.geometric(0.15, 2) + rng.integers(0, 3, 2) + 1, 2, longest - 2)
        sides = [[4 + index // 30, 4 + index % 30, *rng.integers(4, 37, length - 1).tolist(), 2] for length in lengths]
        pairs.append(tuple(sides))
    return pairs


def content(batch, pad_id=3):
    """Return the pairs of a batch without their padding."""
    return [
        tuple([token for token in row.tolist() if token != pad_id] for row in rows)
        for rows in zip(batch.source_ids, batch.labels, strict=True)
        if (rows[1] != pad_id).any()
    ]


def epoch(batches):
    return [next(batches) for _ in range(batches.per_epoch)]


def same(ours, theirs):
    names = ("source_ids", "target_ids", "labels")
    return ours.tokens == theirs.tokens and all(
        np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in names
    )


def flat(batches):
    return sorted(pair for batch in batches for pair in content(batch))


@pytest.mark.parametrize("multiple", [1, 3, 4])
@pytest.mark.parametrize("tokens", [1, 30, 200, 10_000])
def test_every_pair_once_an_epoch(tokens, multiple):
    pairs = corpus()
    batches = Batches(pairs, CONFIG, tokens, multiple=multiple)
    for _ in range(2):
        assert flat(epoch(batches)) == sorted(pairs)
    assert batches.position == (2, 0)
    assert flat(batches.once()) == sorted(pairs)
    assert sum(batch.tokens for batch in batches.once()) == sum(len(target) for _, target in pairs)
    assert batches.dropped == 0


@pytest.mark.parametrize("multiple", [1, 3, 4])
@pytest.mark.parametrize("tokens", [1, 30, 200, 10_000])
def test_shapes_are_a_small_closed_set(tokens, multiple):
    batches = Batches(corpus(), CONFIG, tokens, multiple=multiple)
    assert 1 <= len(batches.shapes) == len(set(batches.shapes)) <= 8
    assert json.loads(json.dumps(batches.shapes)) == [list(shape) for shape in batches.shapes]
    for rows, source_width, target_width in batches.shapes:
        assert rows % multiple == 0
        assert rows == multiple or rows * max(source_width, target_width) <= tokens
    seen = set()
    for batch in epoch(batches):
        assert batch.labels.shape == batch.target_ids.shape
        seen.add((*batch.source_ids.shape, batch.labels.shape[1]))
    assert seen == set(batches.shapes)


@pytest.mark.parametrize("preset", PRESETS)
def test_labels_are_what_comes_next(preset):
    config = tiny_config(preset)
    special = {config.pad_id, config.bos_id, config.eos_id}
    free = [token for token in range(37) if token not in special]
    pairs = [([*free[:n], config.eos_id], [*free[n : 2 * n], config.eos_id]) for n in range(1, 12)]
    for batch in epoch(Batches(pairs, config, 40, multiple=2)):
        for array in (batch.source_ids, batch.target_ids, batch.labels):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
            assert array.flags.writeable
        assert batch.tokens == (batch.labels != config.pad_id).sum()
        assert type(batch.tokens) is int
        for read, label in zip(batch.target_ids.tolist(), batch.labels.tolist(), strict=True):
            length = sum(token != config.pad_id for token in label)
            padding = [config.pad_id] * (len(label) - length)
            assert label[length:] == padding
            if length:
                assert label[length - 1] == config.eos_id
                assert read == [config.bos_id, *label[: length - 1], *padding]
            else:
                assert read == padding


def test_a_batch_that_is_not_full_is_filled_up_with_padding():
    batches = Batches(corpus(7, longest=4), CONFIG, 1000, multiple=4)
    assert batches.shapes[0][0] == 8
    (batch,) = batches.once()
    filler = [array[(batch.labels == 3).all(axis=1)] for array in (batch.source_ids, batch.target_ids, batch.labels)]
    assert [rows.tolist() for rows in filler] == [[[3] * array.shape[1]] for array in filler]


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_long_sentence_takes_shorter_ones_along(multiple):
    batches = Batches([*corpus(2000, longest=12), ([5] * 40 + [2], [6, 2])], CONFIG, 410, multiple=multiple)
    assert batches.shapes[-1] == (10 // multiple * multiple, 41, 12)
    *_, last = batches.once()
    assert len(content(last)) == len(last.labels)
    shortest = batches.shapes[0][1:]
    for batch in batches.once():
        if (batch.source_ids.shape[1], batch.labels.shape[1]) != shortest:
            assert len(content(batch)) == len(batch.labels)


@pytest.mark.parametrize(("tokens", "multiple"), [(60, 1), (200, 1), (200, 4), (1000, 1)])
def test_no_other_buckets_would_compute_less(tokens, multiple, monkeypatch):
    monkeypatch.setattr(batches, "MAX_SHAPES", 3)
    monkeypatch.setattr(batches, "WORTH_A_SHAPE", 0.0)
    lengths = np.array([[len(source), len(target)] for source, target in corpus(400, longest=12)])
    longest = lengths.max(axis=1)

    def work(bounds):
        total, below = 0, 0
        for bound in bounds:
            inside = lengths[(below < longest) & (longest <= bound)]
            rows = max(tokens // inside.max() // multiple, 1) * multiple
            total += -(-len(inside) // rows) * rows * inside.max(axis=0).sum()
            below = bound
        return total

    chosen = batches._choose_bounds(lengths, tokens, multiple).tolist()
    shorter = sorted(set(longest.tolist()))[:-1]
    others = [[*some, longest.max()] for count in range(3) for some in itertools.combinations(shorter, count)]
    assert work(chosen) == min(map(work, others))


def test_little_is_padding():
    def share(pairs, tokens):
        batches = Batches(pairs, CONFIG, tokens)
        cells = sum(batch.source_ids.size + batch.labels.size for batch in batches.once())
        padding = sum((batch.source_ids == 3).sum() + (batch.labels == 3).sum() for batch in batches.once())
        assert batches.padding == pytest.approx(padding / cells, abs=1e-12)
        return batches.padding

    same_length = [(source, source) for source, _ in corpus(2000)]
    assert share(same_length, 300) < 0.09
    assert share(corpus(2000), 300) < 0.28  # the two sides are independent here, which no real text is
    assert share(corpus(2000), 300) < share(corpus(2000), 20_000)


def test_many_lengths_are_thinned_but_every_pair_stays(monkeypatch):
    monkeypatch.setattr(batches, "MAX_BOUNDS", 3)
    pairs = corpus()
    assert flat(Batches(pairs, CONFIG, 200).once()) == sorted(pairs)


def test_the_order_is_new_in_each_epoch_and_with_each_seed():
    batches, other = Batches(corpus(), CONFIG, 60, seed=0), Batches(corpus(), CONFIG, 60, seed=1)
    first, second, elsewhere = epoch(batches), epoch(batches), epoch(other)
    for again in (second, elsewhere):
        assert not any(map(same, first, again))
    changes = sum(a.source_ids.shape != b.source_ids.shape for a, b in itertools.pairwise(first))
    assert changes > 2 * len(batches.shapes)  # batches are shuffled, and not only what is in them
    again = {str(sorted(content(batch))) for batch in second}
    assert sum(str(sorted(content(batch))) in again for batch in first) < 0.1 * len(first)


def test_seek_resumes_exactly():
    batches = Batches(corpus(), CONFIG, 60, seed=5)
    positions, made = [], []
    for _ in range(2 * batches.per_epoch + 3):
        positions.append(json.loads(json.dumps(batches.position)))
        made.append(next(batches))
    assert positions[batches.per_epoch] == [1, 0]
    for start in (0, 1, batches.per_epoch - 1, batches.per_epoch, 2 * batches.per_epoch + 1):
        resumed = Batches(corpus(), CONFIG, 60, seed=5)
        resumed.seek(positions[start])
        assert all(map(same, itertools.islice(resumed, 3), made[start : start + 3]))
    batches.seek((0, 0))  # backwards too
    assert same(next(batches), made[0])


def test_one_pass_leaves_the_position_alone():
    batches = Batches(corpus(), CONFIG, 60)
    next(batches)
    before = batches.position
    first, again = list(batches.once()), list(batches.once())
    assert batches.position == before == (0, 1)
    assert all(map(same, first, again))
    assert len(first) == batches.per_epoch
    widths = [batch.labels.shape[1] + batch.source_ids.shape[1] for batch in first]
    assert widths == sorted(widths)
    place = {str(pair): index for index, pair in enumerate(corpus())}
    for _, alike in itertools.groupby(first, key=lambda batch: batch.labels.shape + batch.source_ids.shape):
        places = [place[str(pair)] for batch in alike for pair in content(batch)]
        assert places == sorted(places)


def test_a_batch_of_yours_changes_no_later_one():
    batches = Batches(corpus(20), CONFIG, 10_000)
    (batch,) = batches.once()
    expected = batch.labels.copy()
    for array in (batch.source_ids, batch.target_ids, batch.labels):
        array[:] = 9
    (again,) = batches.once()
    assert np.array_equal(again.labels, expected)


CHECKSUMS = """
import zlib
from test_data import CONFIG, Batches, Subwords, corpus, date_lines, date_pairs, epoch
batches = Batches(corpus(), CONFIG, 60, seed=3)
order = [array.tobytes() for batch in epoch(batches) for array in (batch.source_ids, batch.target_ids, batch.labels)]
pairs = repr(date_pairs(2000, 3, held_out=False)) + repr(date_pairs(2000, 3, held_out=True))
model = Subwords.train(date_lines(), kind="char").model
print(*map(zlib.crc32, (b"".join(order), pairs.encode(), model)))
"""


def test_every_process_gets_the_same():
    def run(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.path.dirname(__file__)}
        return subprocess.run(
            [sys.executable, "-c", CHECKSUMS], env=environment, capture_output=True, text=True, check=True
        ).stdout

    first, second = run("1"), run("2")
    assert first == second
    assert len(first.split()) == 3


def test_the_order_outlives_numpy():
    pairs = [([token, 2], [token, 2]) for token in range(4, 12)]
    batches = Batches(pairs, CONFIG, 4, seed=7)
    assert [[pair[0][0] for pair in content(batch)] for batch in epoch(batches)] == [[9, 5], [6, 11], [8, 4], [10, 7]]


def test_long_pairs_are_dropped_and_counted():
    pairs = corpus(300)
    limit = 10
    short = [pair for pair in pairs if max(map(len, pair)) <= limit]
    assert 0 < len(short) < 300
    batches = Batches(pairs, CONFIG, 100, max_length=limit)
    assert batches.dropped == 300 - len(short)
    assert flat(batches.once()) == sorted(short)
    learned = tiny_config(pad_id=3, position_encoding="learned", max_length=limit)
    assert Batches(pairs, learned, 100).dropped == batches.dropped
    assert Batches(pairs, learned, 100, max_length=limit + 5).dropped == batches.dropped
    assert Batches(pairs, learned, 100, max_length=limit - 1).dropped > batches.dropped


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pairs": []}, ValueError, "no pair is left to train on: got 0"),
        ({"max_length": 2}, ValueError, "no pair is left to train on: got 20, 20 of them too long"),
        ({"pairs": [([5, 2], [])]}, ValueError, "at least eos_id: the target of pair 0 is empty"),
        ({"pairs": [([5, 2], [5, 2]), ([5, 3, 2], [5, 2])]}, ValueError, "pad_id 3 must not occur in the source of"),
        ({"tokens_per_batch": 0}, ValueError, "tokens_per_batch must be at least 1: got 0"),
        ({"tokens_per_batch": 10.0}, TypeError, "tokens_per_batch must be an integer"),
        ({"multiple": 0}, ValueError, "multiple must be at least 1"),
        ({"multiple": 21}, ValueError, "a batch in 21 slices takes as many pairs or more: got 20"),
        ({"multiple": 10**9}, ValueError, "a batch in 1,000,000,000 slices takes as many pairs or more: got 20"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"max_length": True}, TypeError, "max_length must be an integer"),
    ],
)
def test_what_cannot_be_batched(change, error, message):
    with pytest.raises(error, match=message):
        Batches(**{"pairs": corpus(20), "config": CONFIG, "tokens_per_batch": 100, **change})


@pytest.mark.parametrize(
    ("position", "error"),
    [((0, 10**6), ValueError), ((-1, 0), ValueError), ((0, -1), ValueError), ((0.0, 0), TypeError), ((0,), TypeError)],
)
def test_no_such_position(position, error):
    batches = Batches(corpus(), CONFIG, 60)
    next(batches)
    with pytest.raises(error):
        batches.seek(position)
    assert batches.position == (0, 1)


def test_lines_end_at_a_newline_and_nowhere_else(tmp_path):
    """In training, evaluation and comparison as in translation: a lone carriage return would shift all later pairs."""
    text = "a\rb\x0bc\u2028d\x85e\r\nf\n"
    (tmp_path / "a").write_bytes(text.encode())
    (tmp_path / "b.gz").write_bytes(gzip.compress(text.encode()))
    assert read_pairs(tmp_path / "a", tmp_path / "b.gz") == [("a\rb\x0bc\u2028d\x85e",) * 2, ("f", "f")]


def test_an_encoding_error_names_file_and_line(tmp_path):
    (tmp_path / "a").write_bytes(b"a\rb\nc\n\xe4\n")
    with pytest.raises(ValueError, match=r"a is not UTF-8 text: line 3: .* byte 0xe4"):
        read_pairs(tmp_path / "a", tmp_path / "a")


def test_a_file_in_one_line_is_refused_or_left_out_at_once(vocabulary):
    config = config_for(vocabulary)
    numbered = number([("a b " * 250_000, "a"), ("a", "b")], vocabulary.numbered(config))
    assert len(numbered[0][0]) > 100_000
    assert Batches(numbered, config, 100, max_length=LONGEST).dropped == 1
    with pytest.raises(ValueError, match=r"a sentence is [\d,]+ tokens long, and may have at most 4,096"):
        pad([ids for ids, _ in numbered], config)


def test_an_absurd_vocabulary_is_refused_at_once():
    with pytest.raises(ValueError, match="at most 1,114,112 entries: got 1,000,000,000,000"):
        Subwords.train(["a b"], 10**12)


def test_numbered_text(sentences):
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
