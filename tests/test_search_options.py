"""The options and results of a search: lengths, start tokens, padding, and rejected inputs."""

from __future__ import annotations

import numpy as np
import pytest
from search_models import EITHER, REPEATED, TOLERANCE, assert_same, lively, load, load_reference, sources, tokens_of
from search_models import _quick as _quick  # a fixture of every test

import reference_numpy

# --- Requested lengths and tokens. ---


@pytest.mark.parametrize("search", EITHER)
@REPEATED
def test_search_result_does_not_depend_on_the_batch(backend, search):
    config, weights = lively()
    model, source_ids = load(backend, config, weights), sources(config)
    find = getattr(backend.package, search)
    together = find(model, source_ids)  # the default limit is the source length + 50, which differs between sentences
    for row, source in enumerate(source_ids):
        alone = find(model, source[None, source != config.pad_id])
        assert tokens_of(alone.ids[0], config) == tokens_of(together.ids[row], config)
        assert alone.scores[0] == pytest.approx(together.scores[row], rel=TOLERANCE)


@REPEATED
def test_maximum_length_follows_each_source_sentence(backend):
    config, weights = lively()
    weights["output_proj.bias"][config.eos_id] = -1e3  # EOS is never generated
    for find in (backend.package.greedy_search, backend.package.beam_search):
        found = find(load(backend, config, weights), sources(config))
        assert (found.ids != config.pad_id).sum(1).tolist() == [56, 54, 51, 55, 52]
    learned, weights = lively(position_encoding="learned", position_offset=3)
    weights["output_proj.bias"][config.eos_id] = -1e3
    found = backend.package.greedy_search(load(backend, learned, weights), sources(learned))
    assert found.ids.shape == (5, learned.max_positions)


@pytest.mark.parametrize("search", EITHER)
@REPEATED
def test_length_limits_and_start_token_are_applied(backend, search):
    config, weights = lively()
    weights["output_proj.bias"][config.eos_id] += 1e3
    model, find = load(backend, config, weights), getattr(backend.package, search)
    source_ids = sources(config)
    assert (find(model, source_ids).ids == config.eos_id).all()
    found = find(model, source_ids, min_length=4)
    assert found.ids.shape == (5, 4)
    assert (found.ids[:, :3] != config.eos_id).all()
    assert (found.ids[:, 3] == config.eos_id).all()
    cut = find(model, source_ids, min_length=3, max_length=3)
    assert cut.ids.shape == (5, 3)
    # The start token determines the following tokens.
    config, weights = lively()
    started = find(load(backend, config, weights), source_ids, max_length=6, start_id=7)
    same = find(load(backend, config.replace(bos_id=7), weights), source_ids, max_length=6)
    assert_same(started, same)
    assert started.ids.tolist() != find(load(backend, config, weights), source_ids, max_length=6).ids.tolist()


@pytest.mark.parametrize("search", EITHER)
@REPEATED
def test_searches_never_generate_padding(backend, search):
    for overrides in ({}, {"bos_id": 0}):  # the start token may be padding
        config, weights = lively(**overrides)
        weights["output_proj.bias"][config.pad_id] = 1e3
        found = getattr(backend.package, search)(load(backend, config, weights), sources(config), max_length=9)
        lengths = (found.ids != config.pad_id).sum(1)
        for row, length in zip(found.ids, lengths, strict=True):
            assert (row[:length] != config.pad_id).all()
            assert length == 9 or row[length - 1] == config.eos_id
        assert (found.scores < -900).all()  # the probability of padding isn't redistributed


@pytest.mark.parametrize("search", EITHER)
@pytest.mark.extended("searches", "tf")
def test_callback_receives_the_tokens_of_each_step(backend, search):
    config, weights = lively()
    options = {"max_length": 8, **({"beam_size": 3} if search == "beam_search" else {})}
    expected, shown = [], []
    reference = getattr(reference_numpy, search)(
        load_reference(config, weights), sources(config), **options, on_step=expected.append
    )
    found = getattr(backend.package, search)(
        load(backend, config, weights), sources(config), **options, on_step=shown.append
    )
    assert_same(found, reference)
    assert len(shown) == len(expected) > 3
    for ours, theirs in zip(shown, expected, strict=True):
        assert isinstance(ours, np.ndarray)
        assert ours.dtype == np.int64
        np.testing.assert_array_equal(ours, theirs)


# --- Invalid inputs: all backends raise the same errors. ---


BAD = {
    "beam_size": [
        (0, ValueError, "beam_size must be at least 1: got 0"),
        (2.0, TypeError, "beam_size must be an integer: got 2.0"),
        (True, TypeError, "beam_size must be an integer: got True"),
    ],
    "num_hypotheses": [
        (0, ValueError, "num_hypotheses must be at least 1: got 0"),
        (5, ValueError, "num_hypotheses must be at most beam_size: got 5 and 4"),
        (None, TypeError, "num_hypotheses must be an integer: got None"),
    ],
    "length_penalty": [
        (-0.5, ValueError, "length_penalty must be at least 0: got -0.5"),
        (float("nan"), ValueError, "length_penalty must be at least 0: got nan"),
        ("0.6", TypeError, "length_penalty must be a number: got '0.6'"),
    ],
    "length_penalty_kind": [("wu", ValueError, "length_penalty_kind must be one of gnmt, power: got 'wu'")],
}
BAD_EVERYWHERE = {
    "max_length": [
        (0, ValueError, "max_length must be at least 1: got 0"),
        (27, ValueError, "max_length must be at most 26 for this model: got 27"),
        ("9", TypeError, "max_length must be an integer: got '9'"),
    ],
    "min_length": [
        (0, ValueError, "min_length must be at least 1: got 0"),
        (27, ValueError, "min_length must be at most max_length: got 27 and 26"),
    ],
    "start_id": [
        (-1, ValueError, "start_id must be at least 0: got -1"),
        (13, ValueError, "start_id must be in [0, 13): got 13"),
    ],
    "source_ids": [
        ([[3, 13]], ValueError, "source_ids must be in [0, 13): got 13 at [0, 1]"),
        (np.zeros((0, 3), int), ValueError, "source_ids must contain at least one token: got shape (0, 3)"),
        (np.zeros((2, 0), int), ValueError, "source_ids must contain at least one token: got shape (2, 0)"),
        (np.ones((1, 27), int), ValueError, "source_ids must be at most 26 tokens long: got 27"),
        ([[1.0]], TypeError, "source_ids must be integers: got float64"),
    ],
    "source_mask": [
        (np.ones((2, 3)), TypeError, "source_mask must be boolean, True where attention is allowed: got float64")
    ],
}


@pytest.fixture(scope="module")
def limited(backend):
    """Return a model that supports 26 positions."""
    return load(backend, *lively(position_encoding="learned", position_offset=3))


@pytest.mark.parametrize(
    ("search", "name", "value", "error", "message"),
    [
        (search, name, *bad)
        for search, table in (("greedy_search", BAD_EVERYWHERE), ("beam_search", {**BAD_EVERYWHERE, **BAD}))
        for name, several in table.items()
        for bad in several
    ],
)
def test_invalid_input_raises_the_same_error_in_every_backend(backend, limited, search, name, value, error, message):
    options = {"source_ids": [[3, 4, 5], [6, 7, 8]], name: value}
    with pytest.raises(error) as caught:
        getattr(backend.package, search)(limited, options.pop("source_ids"), **options)
    assert str(caught.value) == message


def test_several_hypotheses_of_a_greedy_search_raise_value_error():
    with pytest.raises(ValueError, match="num_hypotheses=3 requires beam search or sampling; set beam_size or seed"):
        reference_numpy.Search(num_hypotheses=3)


def test_min_length_above_max_length_raises_value_error(backend):
    model = load(backend, *lively())
    for find in (backend.package.greedy_search, backend.package.beam_search):
        with pytest.raises(ValueError, match="min_length must be at most max_length: got 6 and 5"):
            find(model, [[3, 4]], min_length=6, max_length=5)
        with pytest.raises(ValueError, match="min_length must be at most max_length: got 60 and 52"):
            find(model, [[3, 4]], min_length=60)


def test_search_rejects_a_model_whose_eos_is_padding(backend):
    model = load(backend, *lively(eos_id=0))
    for find in (backend.package.greedy_search, backend.package.beam_search):
        with pytest.raises(ValueError, match="eos_id must differ from pad_id in a search: both are 0"):
            find(model, [[3, 4]])


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("size", [13, pytest.param(300, marks=REPEATED)])
def test_search_raises_if_the_model_computes_nan(backend, size):
    config, weights = lively(size=size)
    weights["decoder.final_norm.scale"][:] = 1e30
    weights["output_proj.kernel"][:] = 1e30
    model = load(backend, config, weights, "float32")
    for find, score in ((backend.package.greedy_search, "nan"), (backend.package.beam_search, "inf")):
        message = f"the best score of each sequence must be finite: got {score} in row 0"
        with pytest.raises(ValueError, match=f"^{message}$"):
            find(model, [[3, 4]], max_length=3)


def test_invalid_decode_steps_raise_the_same_error_in_every_backend(backend, limited):
    source_ids = [[3, 4, 5], [6, 7, 8]]
    for options, error, message in (
        ({"capacity": 0}, ValueError, "capacity must be at least 1: got 0"),
        ({"capacity": 27}, ValueError, "capacity must be at most 26 for this model: got 27"),
        ({"capacity": 2.5}, TypeError, "capacity must be an integer: got 2.5"),
        ({"capacity": 4, "beam_size": 0}, ValueError, "beam_size must be at least 1: got 0"),
    ):
        with pytest.raises(error) as caught:
            limited.init_cache(source_ids, **options)
        assert str(caught.value) == message
    cache = limited.init_cache(source_ids, 1, beam_size=2)
    for ids, error, message in (
        ([1, 1], ValueError, "target_ids must have shape (4,): got (2,)"),
        ([1, 1, 1, 13], ValueError, "target_ids must be in [0, 13): got 13 at [0, 3]"),
        ([1.0] * 4, TypeError, "target_ids must be integers: got float64"),
    ):
        with pytest.raises(error) as caught:
            limited.decode_step(ids, cache)
        assert str(caught.value) == message
    _, cache = limited.decode_step([1, 1, 1, 1], cache)
    with pytest.raises(ValueError, match="the cache is full: all 1 positions are in use"):
        limited.decode_step([1, 1, 1, 1], cache)
