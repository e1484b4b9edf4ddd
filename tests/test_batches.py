"""Batching: each epoch uses every pair once, with few shapes and little padding, in a reproducible order."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import tiny_config

from transformer_parity.apps.train import batches
from transformer_parity.apps.train.batches import Batches

# Each preset has different special IDs.
PRESETS = ["paper_base", "t2t_2017", "annotated", "marian", "fairseq", "flax_wmt"]
CONFIG = tiny_config(pad_id=3, bos_id=1, eos_id=2)


def corpus(count=500, longest=25, seed=0):
    """Return distinct numbered pairs, in which short sentences are the most frequent."""
    rng = np.random.default_rng(seed)
    pairs = []
    for index in range(count):
        lengths = np.clip(rng.geometric(0.15, 2) + rng.integers(0, 3, 2) + 1, 2, longest - 2)
        sides = [[4 + index // 30, 4 + index % 30, *rng.integers(4, 37, length - 1).tolist(), 2] for length in lengths]
        pairs.append(tuple(sides))
    return pairs


def content(batch, pad_id=3):
    """Return the pairs in a batch without their padding."""
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
def test_epoch_contains_every_pair_once(tokens, multiple):
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
def test_batches_have_only_the_few_listed_shapes(tokens, multiple):
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
def test_labels_are_the_shifted_targets(preset):
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


def test_incomplete_batch_is_filled_with_padding_rows():
    batches = Batches(corpus(7, longest=4), CONFIG, 1000, multiple=4)
    assert batches.shapes[0][0] == 8
    (batch,) = batches.once()
    filler = [array[(batch.labels == 3).all(axis=1)] for array in (batch.source_ids, batch.target_ids, batch.labels)]
    assert [rows.tolist() for rows in filler] == [[[3] * array.shape[1]] for array in filler]


@pytest.mark.parametrize("multiple", [1, 4])
def test_batches_of_long_sentences_are_filled_with_shorter_sentences(multiple):
    batches = Batches([*corpus(2000, longest=12), ([5] * 40 + [2], [6, 2])], CONFIG, 410, multiple=multiple)
    assert batches.shapes[-1] == (10 // multiple * multiple, 41, 12)
    *_, last = batches.once()
    assert len(content(last)) == len(last.labels)
    shortest = batches.shapes[0][1:]
    for batch in batches.once():
        if (batch.source_ids.shape[1], batch.labels.shape[1]) != shortest:
            assert len(content(batch)) == len(batch.labels)


@pytest.mark.parametrize(("tokens", "multiple"), [(60, 1), (200, 1), (200, 4), (1000, 1)])
def test_chosen_buckets_minimize_computation(tokens, multiple, monkeypatch):
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


def test_percentage_of_padding_is_small():
    def share(pairs, tokens):
        batches = Batches(pairs, CONFIG, tokens)
        cells = sum(batch.source_ids.size + batch.labels.size for batch in batches.once())
        padding = sum((batch.source_ids == 3).sum() + (batch.labels == 3).sum() for batch in batches.once())
        assert batches.padding == pytest.approx(padding / cells, abs=1e-12)
        return batches.padding

    same_length = [(source, source) for source, _ in corpus(2000)]
    assert share(same_length, 300) < 0.09
    assert share(corpus(2000), 300) < 0.28  # the lengths of the two sides are independent here, unlike in real text
    assert share(corpus(2000), 300) < share(corpus(2000), 20_000)


def test_limited_number_of_buckets_keeps_every_pair(monkeypatch):
    monkeypatch.setattr(batches, "MAX_BOUNDS", 3)
    pairs = corpus()
    assert flat(Batches(pairs, CONFIG, 200).once()) == sorted(pairs)


def test_order_changes_with_epoch_and_seed():
    batches, other = Batches(corpus(), CONFIG, 60, seed=0), Batches(corpus(), CONFIG, 60, seed=1)
    first, second, elsewhere = epoch(batches), epoch(batches), epoch(other)
    for again in (second, elsewhere):
        assert not any(map(same, first, again))
    changes = sum(a.source_ids.shape != b.source_ids.shape for a, b in itertools.pairwise(first))
    assert changes > 2 * len(batches.shapes)  # the order of the batches is shuffled, not only their contents
    again = {str(sorted(content(batch))) for batch in second}
    assert sum(str(sorted(content(batch))) in again for batch in first) < 0.1 * len(first)


def test_seek_resumes_at_the_same_batch():
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
    batches.seek((0, 0))  # seeking backward also works
    assert same(next(batches), made[0])


def test_once_does_not_advance_the_position():
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


def test_modifying_a_batch_does_not_change_later_batches():
    batches = Batches(corpus(20), CONFIG, 10_000)
    (batch,) = batches.once()
    expected = batch.labels.copy()
    for array in (batch.source_ids, batch.target_ids, batch.labels):
        array[:] = 9
    (again,) = batches.once()
    assert np.array_equal(again.labels, expected)


CHECKSUMS = """
import zlib
from test_batches import CONFIG, corpus, epoch
from transformer_parity.apps.text.dates import date_lines, date_pairs
from transformer_parity.transformer.sentences.subwords import Subwords
from transformer_parity.apps.train.batches import Batches
batches = Batches(corpus(), CONFIG, 60, seed=3)
order = [array.tobytes() for batch in epoch(batches) for array in (batch.source_ids, batch.target_ids, batch.labels)]
pairs = repr(date_pairs(2000, 3, held_out=False)) + repr(date_pairs(2000, 3, held_out=True))
model = Subwords.train(date_lines(), kind="char").model
print(*map(zlib.crc32, (b"".join(order), pairs.encode(), model)))
"""


def test_batches_do_not_depend_on_the_hash_seed():
    def run(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.path.dirname(__file__)}
        return subprocess.run(
            [sys.executable, "-c", CHECKSUMS], env=environment, capture_output=True, text=True, check=True
        ).stdout

    first, second = run("1"), run("2")
    assert first == second
    assert len(first.split()) == 3


def test_order_does_not_depend_on_the_numpy_version():
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
        ({"pairs": []}, ValueError, "all 0 sentence pairs are longer than"),
        (
            {"max_length": 2},
            ValueError,
            "all 20 sentence pairs are longer than the maximum length of 2 tokens",
        ),
        (
            {"pairs": [([5, 2], [])]},
            ValueError,
            "the target of pair 0 must contain at least eos_id: got an empty sentence",
        ),
        ({"pairs": [([5, 2], [5, 2]), ([5, 3, 2], [5, 2])]}, ValueError, "pad_id 3 must not occur in the source of"),
        ({"tokens_per_batch": 0}, ValueError, "tokens_per_batch must be at least 1: got 0"),
        ({"tokens_per_batch": 10.0}, TypeError, "tokens_per_batch must be an integer"),
        ({"multiple": 0}, ValueError, "multiple must be at least 1"),
        ({"multiple": 21}, ValueError, "21 micro-batches require at least 21 pairs: got 20"),
        ({"multiple": 10**9}, ValueError, "1,000,000,000 micro-batches require at least 1,000,000,000 pairs: got 20"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"max_length": True}, TypeError, "max_length must be an integer"),
    ],
)
def test_invalid_batch_arguments_are_rejected(change, error, message):
    with pytest.raises(error, match=message):
        Batches(**{"pairs": corpus(20), "config": CONFIG, "tokens_per_batch": 100, **change})


@pytest.mark.parametrize(
    ("position", "error"),
    [((0, 10**6), ValueError), ((-1, 0), ValueError), ((0, -1), ValueError), ((0.0, 0), TypeError), ((0,), TypeError)],
)
def test_seeking_an_invalid_position_raises(position, error):
    batches = Batches(corpus(), CONFIG, 60)
    next(batches)
    with pytest.raises(error):
        batches.seek(position)
    assert batches.position == (0, 1)
