"""Greedy and beam search, compared with an exhaustive search, a textbook beam search, and between backends."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import numpy as np
import pytest
import third_party
from conftest import random_weights, tiny_config
from search_models import (
    EITHER,
    REPEATED,
    SEARCHES,
    TOLERANCE,
    assert_same,
    lively,
    load,
    load_reference,
    sources,
    tokens_of,
)
from search_models import _quick as _quick  # a fixture of every test

import reference_numpy
from reference_numpy import length_penalty
from reference_numpy.functional import log_softmax

# --- The definition: exhaustive search and textbook beam search. ---


def score_all(model, source, prefixes):
    """Return the log-probability of each next token after each prefix, computed without a cache."""
    target = np.array([[model.config.bos_id, *prefix] for prefix in prefixes])
    logits = model(np.repeat(source[None], len(target), 0), target)[:, -1]
    return log_softmax(logits)


def enumerate_hypotheses(model, source, max_length, penalty):
    """Return the (score, tokens) pair of every hypothesis, finished or truncated, best first."""
    config = model.config
    complete, unfinished = [], {(): 0.0}
    for n in range(1, max_length + 1):
        scores = score_all(model, source, list(unfinished))
        longer = {}
        for (prefix, total), row in zip(unfinished.items(), scores, strict=True):
            for token in range(config.target_vocab_size):
                if token == config.eos_id or (n == max_length and token != config.pad_id):
                    complete.append(((total + row[token]) / penalty(n), (*prefix, token)))
                elif token != config.pad_id:
                    longer[(*prefix, token)] = total + row[token]
        unfinished = longer
    return sorted(complete, reverse=True)


def textbook_beam_search(model, source, beam_size, max_length, penalty, min_length=1):
    """Return the (score, tokens) pairs of finished hypotheses, best first, using lists and without stopping early."""
    config = model.config
    beam, finished = [(0.0, ())], []
    for n in range(1, max_length + 1):
        if not beam:
            break
        scores = score_all(model, source, [prefix for _, prefix in beam])
        candidates = [
            (total + row[token], (*prefix, token))
            for (total, prefix), row in zip(beam, scores, strict=True)
            for token in range(config.target_vocab_size)
            if token != config.pad_id and not (token == config.eos_id and n < min_length)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])  # stable: the first of equal candidates comes first
        ended = [tokens[-1] == config.eos_id or n == max_length for _, tokens in candidates]
        finished += [
            (total / penalty(n), tokens)
            for (total, tokens), ends in zip(candidates[:beam_size], ended, strict=False)
            if ends
        ]
        going_on = [candidate for candidate, ends in zip(candidates, ended, strict=True) if not ends]
        beam = going_on[:beam_size]
    return sorted(finished, key=lambda hypothesis: -hypothesis[0])


@pytest.mark.parametrize("kind", ["gnmt", pytest.param("power", marks=REPEATED)])
@pytest.mark.parametrize("alpha", [pytest.param(0.0, marks=REPEATED), 0.6, pytest.param(1.5, marks=REPEATED)])
@pytest.mark.extended("searches", "jax", "tf")
def test_wide_beam_matches_exhaustive_enumeration(backend, alpha, kind):
    config, weights = lively(size=5)
    reference, source_ids = load_reference(config, weights), sources(config)
    for max_length in (1, 4):
        found = backend.package.beam_search(
            load(backend, config, weights),
            source_ids,
            beam_size=70,  # exceeds the vocabulary size and the number of prefixes
            length_penalty=alpha,
            max_length=max_length,
            num_hypotheses=9,
            length_penalty_kind=kind,
        )
        for row, source in enumerate(source_ids):
            penalty = partial(length_penalty, alpha=alpha, kind=kind)
            best = enumerate_hypotheses(reference, source[source != config.pad_id], max_length, penalty)[:9]
            assert [tokens_of(ids, config) for ids in found.nbest_ids[row]][: len(best)] == [ids for _, ids in best]
            np.testing.assert_allclose(found.nbest_scores[row, : len(best)], [score for score, _ in best], TOLERANCE)
            assert (found.nbest_scores[row, len(best) :] == -np.inf).all()
            assert (found.nbest_ids[row, len(best) :] == config.pad_id).all()
            if max_length == 1:
                assert len(best) == 4 < 9


@pytest.mark.parametrize("beam_size", [pytest.param(1, marks=REPEATED), 2, pytest.param(5, marks=REPEATED)])
@pytest.mark.extended("searches", "jax", "tf")
def test_beam_search_matches_the_textbook_algorithm(backend, beam_size):
    config, weights = lively()
    reference, source_ids = load_reference(config, weights), sources(config)
    model, count = load(backend, config, weights), min(beam_size, 3)
    lengths = set()
    for alpha in (0.0, 0.6, 2.0):
        penalty = partial(length_penalty, alpha=alpha)
        found = backend.package.beam_search(
            model, source_ids, beam_size, alpha, max_length=11, min_length=3, num_hypotheses=count
        )
        for row, source in enumerate(source_ids):
            best = textbook_beam_search(reference, source[source != config.pad_id], beam_size, 11, penalty, 3)[:count]
            assert [tokens_of(ids, config) for ids in found.nbest_ids[row]] == [tokens for _, tokens in best]
            np.testing.assert_allclose(found.nbest_scores[row], [score for score, _ in best], TOLERANCE)
            lengths |= {len(tokens) for _, tokens in best}
    assert len(lengths) > 1  # beams finish at different times


def test_greedy_search_matches_the_textbook_algorithm(backend):
    config, weights = lively()
    reference, source_ids = load_reference(config, weights), sources(config)
    found = backend.package.greedy_search(load(backend, config, weights), source_ids, max_length=11)
    lengths = set()
    for row, source in enumerate(source_ids):
        ((score, tokens),) = textbook_greedy(reference, source[source != config.pad_id], 11)
        assert tokens_of(found.ids[row], config) == tokens
        assert found.scores[row] == pytest.approx(score, rel=TOLERANCE)
        lengths.add(len(tokens))
    assert len(lengths) > 2
    assert max(lengths) < 12
    assert found.ids.shape == (len(source_ids), max(lengths))


def textbook_greedy(model, source, max_length):
    tokens, total = (), 0.0
    while len(tokens) < max_length and tokens[-1:] != (model.config.eos_id,):
        row = score_all(model, source, [tokens])[0]
        row[model.config.pad_id] = -np.inf
        tokens, total = (*tokens, int(row.argmax())), total + row.max()
    return [(total, tokens)]


@REPEATED
def test_beam_search_stops_as_early_as_an_exact_result_allows(backend):
    """The search continues only while the most likely unfinished hypothesis could still become the best."""
    config, weights = lively()
    model, reference = load(backend, config, weights), load_reference(config, weights)
    source_ids = sources(config)[3:4]
    steps = {}
    for alpha in (0.0, 0.6, 1.0):
        shown = []
        found = backend.package.beam_search(model, source_ids, 3, alpha, max_length=28, on_step=shown.append)
        steps[alpha] = len(shown)
        penalty = partial(length_penalty, alpha=alpha)
        score, tokens = textbook_beam_search(reference, source_ids[0, :5], 3, 28, penalty)[0]
        assert tokens_of(found.ids[0], config) == tokens
        assert (shown[-1] == config.pad_id).all()
        hopes = [log_probability_of(reference, source_ids[0], ids[0, 0]) / penalty(28) for ids in shown[:-1]]
        assert hopes[-1] > score or len(hopes) < len(tokens)
    assert steps[0.0] < steps[0.6] < steps[1.0] < 28


def log_probability_of(model, source, tokens):
    """Return the log-probability of a sequence, with or without an EOS token."""
    logits = model(source[None], np.array([[model.config.bos_id, *tokens[:-1]]]))[0]
    return np.take_along_axis(log_softmax(logits), np.asarray(tokens)[:, None], -1).sum()


@pytest.mark.parametrize("beam_size", [pytest.param(1, marks=REPEATED), 2, pytest.param(4, marks=REPEATED)])
@REPEATED
def test_hugging_face_search_gives_the_same_result(backend, beam_size):
    """The ``marian`` preset starts with padding, which is never generated, and uses n^alpha as length penalty."""
    config = tiny_config("marian", max_length=64)
    weights = random_weights(config, 2)
    weights["output_proj.bias"] = weights["output_proj.bias"] * 5  # with tied embeddings, models tend to repeat tokens
    weights["output_proj.bias"][config.eos_id] += 4.0
    model, source_ids = load(backend, config, weights), sources(config)
    if beam_size == 1:
        found = backend.package.greedy_search(model, source_ids, max_length=12)
        expected, _ = third_party.marian_search(config, weights, source_ids, 12, num_beams=1)
    else:
        for alpha in (0.6, 1.0):
            options = {"num_beams": beam_size, "num_return_sequences": beam_size, "length_penalty": alpha}
            expected, scores = third_party.marian_search(config, weights, source_ids, 12, **options)
            found = backend.package.beam_search(
                model, source_ids, beam_size, alpha, 12, num_hypotheses=beam_size, length_penalty_kind="power"
            )
            np.testing.assert_allclose(found.nbest_scores, scores, rtol=1e-6)  # Hugging Face sums in float32
            np.testing.assert_array_equal(found.nbest_ids, expected)
    np.testing.assert_array_equal(found.nbest_ids, expected)
    assert len({len(tokens_of(ids, config)) for ids in found.nbest_ids.reshape(-1, found.ids.shape[1])}) > 1


@REPEATED
def test_ties_go_to_the_lower_id(backend):
    config, weights = lively()
    weights = {name: np.zeros_like(array) for name, array in weights.items()}
    for dtype in ("float64", "float32"):
        model, source_ids = load(backend, config, weights, dtype), sources(config)
        greedy = backend.package.greedy_search(model, source_ids, max_length=4)
        assert (greedy.ids == 1).all()  # 0 is padding
        expected = reference_numpy.beam_search(
            load_reference(config, weights, dtype), source_ids, 4, max_length=4, num_hypotheses=4
        )
        found = backend.package.beam_search(model, source_ids, 4, max_length=4, num_hypotheses=4)
        np.testing.assert_array_equal(found.nbest_ids, expected.nbest_ids)
    assert expected.nbest_ids[0].tolist() == [[2, 0, 0, 0], [1, 2, 0, 0], [1, 1, 2, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=REPEATED)])
@pytest.mark.extended("searches", "jax", "tf")
def test_ties_go_to_the_lower_id_in_a_large_vocabulary(backend, dtype):
    """Ties are resolved correctly even if the search for the best token splits the vocabulary into blocks."""
    config, weights = lively(size=300)
    config = config.replace(eos_id=299)  # the last and most likely token
    weights = {name: np.zeros_like(array) for name, array in weights.items()}
    weights["output_proj.bias"][:] = np.random.default_rng(0).integers(2, size=300) / 2
    weights["output_proj.bias"][[40, 200]] = 1.0  # the first tied token is in a block without larger logits
    weights["output_proj.bias"][[5, 210, 290]] = 1.5
    weights["output_proj.bias"][config.eos_id] = 4.0
    for beam_size, length in ((1, 4), (3, 4), (7, 4), (7, 1)):
        options = {"beam_size": beam_size, "max_length": length, "num_hypotheses": beam_size}
        options["length_penalty"] = 3.0  # long hypotheses win even though their first tokens weren't the best
        expected = reference_numpy.beam_search(load_reference(config, weights, dtype), sources(config), **options)
        found = backend.package.beam_search(load(backend, config, weights, dtype), sources(config), **options)
        np.testing.assert_array_equal(found.nbest_ids, expected.nbest_ids)
    weights["output_proj.bias"][config.eos_id] = 0.0
    best = backend.package.greedy_search(load(backend, config, weights, dtype), sources(config), 1)
    assert (best.ids == 5).all()  # the first of three


@pytest.mark.parametrize("kind", ["Beam", "FastBeam"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_top_values_and_indices_match_the_reference(port, count, kind):
    """The result matches the reference for any number of blocks, ties, and NaN values."""
    ours = getattr(import_module(f"{port.package.__name__}.search"), kind).top
    theirs = reference_numpy.search.top
    for size in (8, 31, 32, 33, 64, 65, 300, 2049, 9000):
        values = np.random.default_rng(size).integers(3, size=(6, size)) / 2.0
        values[1] = values[2, 1:] = -np.inf
        values[3, :: max(2, size // 5)] = 2.0
        values[4, size // 2] = values[5, -1] = np.nan
        for array in (values, values.astype(np.float32)):
            best, index = (port.to_numpy(found) for found in largest(port.name, ours, array, count))
            expected, places = theirs(array, count)
            np.testing.assert_array_equal(index, places)
            np.testing.assert_array_equal(best, expected)


def largest(name, top, values, count):
    """Call a port's function as its search does."""
    if name == "torch":
        import torch

        return top(torch.from_numpy(values), count)
    if name == "jax":
        import jax

        return jax.jit(top, static_argnums=1)(values, count)
    import tensorflow as tf

    sizes = [tf.TensorSpec([None, None], values.dtype), tf.TensorSpec([], tf.int32)]
    return tf.function(top, sizes, jit_compile=True)(values, count)


@REPEATED
@pytest.mark.parametrize("search", EITHER)
def test_bfloat16_scores_are_summed_in_float32(port, search):
    """The score of one token is the float32 log-softmax of bfloat16 logits."""
    config, weights = lively()
    model = load(port, config, weights, "bfloat16")
    logits, _ = model.decode_step([config.bos_id] * 5, model.init_cache(sources(config), 1))
    log_probabilities = log_softmax(port.to_numpy(logits).astype(np.float64))
    found = getattr(port.package, search)(model, sources(config), max_length=1)
    np.testing.assert_allclose(found.scores, log_probabilities[np.arange(5), found.ids[:, 0]], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=REPEATED)])
def test_search_results_have_the_documented_types(backend, dtype):
    _check_types(backend, dtype)


@REPEATED
def test_bfloat16_search_results_have_the_documented_types(port):
    _check_types(port, "bfloat16")


def _check_types(backend, dtype):
    config, weights = lively()
    wide = "float64" if dtype == "float64" else "float32"
    for find in (backend.package.greedy_search, backend.package.beam_search):
        found = find(load(backend, config, weights, dtype), sources(config), max_length=5)
        assert isinstance(found.nbest_ids, np.ndarray)
        assert (found.nbest_ids.dtype, found.nbest_scores.dtype) == (np.int64, wide)
        assert found.nbest_ids.shape == (5, 1, 5)
        assert (found.ids == found.nbest_ids[:, 0]).all()
        assert (found.scores == found.nbest_scores[:, 0]).all()
        assert (found.scores < 0).all()
        found.nbest_ids[:] = 0  # belongs to the caller


@pytest.mark.extended("searches", "jax", "tf")
def test_float32_agrees_with_the_reference(backend):
    config, weights = lively()
    for search in SEARCHES:
        expected = getattr(reference_numpy, search)(load_reference(config, weights), sources(config), max_length=10)
        found = getattr(backend.package, search)(
            load(backend, config, weights, "float32"), sources(config), max_length=10
        )
        assert_same(found, expected, 1e-5)
