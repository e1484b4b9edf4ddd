"""Greedy and beam search: against enumeration, against a textbook beam search, and from backend to backend."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from unittest.mock import patch

import numpy as np
import pytest
import third_party
import tiers
from conftest import random_weights, tiny_config

import reference_numpy
from reference_numpy import Recorder, length_penalty
from reference_numpy.functional import log_softmax
from transformer_parity.transformer.cases.standard import preset_case
from transformer_parity.transformer.check.uncompiled import interpreted

TOLERANCE = 1e-12  # float64
SEARCHES = ("greedy_search", "beam_search")
REPEATED = pytest.mark.extended("searches", "jax", "tf")
EITHER = [pytest.param("greedy_search", marks=REPEATED), "beam_search"]
COMPILED = (  # what takes many steps; as users have it compiled
    "test_cached_equals_uncached_step_by_step",
    "test_beam_search_is_the_textbooks",
    "test_a_sentence_does_not_depend_on_its_batch",
    "test_the_maximum_length_follows_each_source",
    "test_each_step_is_shown",
    "test_the_largest_of_many",
)


@pytest.fixture(autouse=True)
def _quick(request):
    """Compile as users have it in few tests only: it takes longer than all else."""
    fixture = next((name for name in ("backend", "port") if name in request.fixturenames), None)
    backend = request.getfixturevalue(fixture).name if fixture else "numpy"
    with optimized_search(backend) if request.node.originalname in COMPILED else quick_search(backend):
        yield


def quick_search(backend):
    """Search without waiting for a compiler that optimizes; TensorFlow, for any."""
    return compiled_search(quick=True) if backend == "jax" else interpreted(backend)


def optimized_search(backend):
    """Search as users do, whatever XLA_FLAGS say to JAX."""
    return compiled_search(quick=False) if backend == "jax" else nullcontext()


@contextmanager
def compiled_search(quick):
    """Let JAX compile its search quickly or well."""
    from transformer_jax import compilation, runtime

    with runtime.quick_compilation():
        options = runtime.compiler_options()
    # Quickly: with bfloat16 rounded as often as where one operation runs at a time. Well: XLA's own defaults.
    exact = {"xla_allow_excess_precision": False}
    options = {**options, **exact} if quick else dict(zip(options, (3, True), strict=False))
    with patch.object(compilation, "compiler_options", lambda: options):
        yield


def lively(preset="annotated", seed=13, size=13, **overrides):
    """Return config and weights of a model whose sentences vary, end, and end at different times."""
    fields = {"tie_embeddings": "none", "output_bias": True, "source_vocab_size": size, "target_vocab_size": size}
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
    config = tiny_config(preset, **{**fields, **ids, **overrides})
    weights = random_weights(config, seed)
    if "output_proj.bias" in weights:
        weights["output_proj.bias"][config.eos_id] += 0.8
    return config, weights


def sources(config, seed=3, lengths=(6, 4, 1, 5, 2)):
    """Return padded source sentences of different lengths."""
    rng = np.random.default_rng(seed)
    ids = np.full((len(lengths), max(lengths)), config.pad_id)
    usual = [token for token in range(config.source_vocab_size) if token != config.pad_id]
    for row, length in enumerate(lengths):
        ids[row, :length] = rng.choice(usual, length)
    return ids


def load(backend, config, weights, dtype="float64"):
    return backend.package.Transformer.from_weights(config, weights, dtype)


def tokens_of(ids, config):
    """Return a hypothesis without padding."""
    return tuple(int(token) for token in ids if token != config.pad_id)


def assert_same(found, expected, tolerance=TOLERANCE):
    np.testing.assert_array_equal(found.nbest_ids, expected.nbest_ids)
    np.testing.assert_allclose(found.nbest_scores, expected.nbest_scores, rtol=tolerance, atol=0)


# --- The definition: all hypotheses there are, and the textbook's beam search. ---


def score_all(model, source, prefixes):
    """Return the log-probability of each next token after each prefix, by the plain model."""
    target = np.array([[model.config.bos_id, *prefix] for prefix in prefixes])
    logits = model(np.repeat(source[None], len(target), 0), target)[:, -1]
    return log_softmax(logits)


def enumerate_hypotheses(model, source, max_length, penalty):
    """Return (score, tokens) of every hypothesis, best first: those that end, and those that are cut off."""
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
    """Return (score, tokens) of the finished hypotheses, best first, with lists and never stopping early."""
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
        candidates.sort(key=lambda candidate: -candidate[0])  # stable: of equal ones the first comes first
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
def test_a_wide_beam_finds_what_enumeration_finds(backend, alpha, kind):
    config, weights = lively(size=5)
    reference, source_ids = load_reference(config, weights), sources(config)
    for max_length in (1, 4):
        found = backend.package.beam_search(
            load(backend, config, weights),
            source_ids,
            beam_size=70,  # wider than the vocabulary, and than there are prefixes
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


def load_reference(config, weights, dtype="float64"):
    return reference_numpy.Transformer.from_weights(config, weights, dtype)


@pytest.mark.parametrize("beam_size", [pytest.param(1, marks=REPEATED), 2, pytest.param(5, marks=REPEATED)])
@pytest.mark.extended("searches", "jax", "tf")
def test_beam_search_is_the_textbooks(backend, beam_size):
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


def test_greedy_search_takes_the_likeliest(backend):
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
def test_the_search_stops_as_early_as_is_exact(backend):
    """It goes on while the likeliest unfinished hypothesis could become the best, and not a step longer."""
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
    """Return the log-probability of some tokens, end symbol or not."""
    logits = model(source[None], np.array([[model.config.bos_id, *tokens[:-1]]]))[0]
    return np.take_along_axis(log_softmax(logits), np.asarray(tokens)[:, None], -1).sum()


@pytest.mark.parametrize("beam_size", [pytest.param(1, marks=REPEATED), 2, pytest.param(4, marks=REPEATED)])
@REPEATED
def test_hugging_face_finds_the_same(backend, beam_size):
    """On a ``marian`` preset, with n^alpha as length penalty; it starts with padding, which is never generated."""
    config = tiny_config("marian", max_length=64)
    weights = random_weights(config, 2)
    weights["output_proj.bias"] = weights["output_proj.bias"] * 5  # tied tables make a model repeat itself
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
            np.testing.assert_allclose(found.nbest_scores, scores, rtol=1e-6)  # they add up in float32
            np.testing.assert_array_equal(found.nbest_ids, expected)
    np.testing.assert_array_equal(found.nbest_ids, expected)
    assert len({len(tokens_of(ids, config)) for ids in found.nbest_ids.reshape(-1, found.ids.shape[1])}) > 1


# --- The cache. ---


def step_by_step(backend, model, source_ids, target_ids):
    """Return the logits of each position, decoded one after another."""
    if backend.name == "jax":  # one compilation instead of one per operation
        import jax
        from flax import nnx

        graph, state = nnx.split(model)

        def run(state, source_ids, target_ids):
            return jax.numpy.stack(_step_by_step(nnx.merge(graph, state), source_ids, target_ids), 1)

        with backend.package.runtime.quick_compilation():
            quick = jax.jit(run, compiler_options=backend.package.runtime.compiler_options())
        return np.asarray(quick(state, source_ids, target_ids))
    return np.stack([backend.to_numpy(logits) for logits in _step_by_step(model, source_ids, target_ids)], 1)


def _step_by_step(model, source_ids, target_ids):
    cache = model.init_cache(source_ids, target_ids.shape[1], len(target_ids) // len(source_ids))
    found = []
    for position in range(target_ids.shape[1]):
        logits, cache = model.decode_step(target_ids[:, position], cache)
        found.append(logits)
    return found


@pytest.mark.parametrize("preset", tiers.presets())
def test_cached_equals_uncached_step_by_step(backend, preset):
    case = preset_case(preset)
    assert (case.inputs["source_ids"] == case.config.pad_id).any()
    weights = random_weights(case.config)
    check_steps(backend, case.config, weights, case.inputs["source_ids"], case.inputs["target_ids"][:, :3])


def test_a_cache_that_is_full_refuses_more(backend):
    """Beyond its capacity a position would be dropped, or take the place of another."""
    config, weights = lively()
    cache = load(backend, config, weights).init_cache(sources(config), 3).past[0]
    keys, values = (backend.from_numpy(np.ones((5, config.num_heads, 3, d))) for d in (config.d_k, config.d_v))
    kept = cache.append(keys, values)
    assert kept.key.shape[1] == config.num_heads
    with pytest.raises(ValueError, match="a cache of 3 positions must have room: 3 are taken, got 1 more"):
        cache.append(keys[:, :, :1], values[:, :, :1])
    assert cache.length == 3


def test_a_decoding_step_gives_a_new_cache_or_says_that_it_does_not(backend):
    """JAX and TensorFlow leave what they are given alone; NumPy and PyTorch write into it."""
    config, weights = lively()
    model = load(backend, config, weights)
    given = model.init_cache(sources(config), 3)
    before = backend.to_numpy(given.past[0].key).copy()
    _, returned = model.decode_step([config.bos_id] * 5, given)
    assert returned.length == 1
    if backend.name in ("numpy", "torch"):
        assert returned is given
        return
    assert given.length == 0
    assert not backend.to_numpy(given.self_mask).any()
    np.testing.assert_array_equal(backend.to_numpy(given.past[0].key), before)


VARIANTS = {
    "d_k is not d_v": {"d_k": 5, "d_v": 11},
    "learned positions, offset": {"position_encoding": "learned", "position_offset": 3},
    "pre-norm, final norm, offset": {"norm_order": "pre", "final_norm": True, "position_offset": 2},
    "starts with padding": {"bos_id": 0},
    "no first self-attention": {"skip_first_self_attention": True, "embedding_norm": True},
    "a decoder of other sizes": {"decoder_num_heads": 2, "decoder_d_v": 5, "decoder_d_ff": 11},
}
FIRST, *OTHERS = VARIANTS


@pytest.mark.parametrize("variant", [FIRST, *(pytest.param(variant, marks=REPEATED) for variant in OTHERS)])
@pytest.mark.extended("searches", "jax", "tf")
def test_cached_equals_uncached_where_conventions_differ(backend, variant):
    config = tiny_config(**VARIANTS[variant])
    source_ids, target_ids = sources(config), sources(config, 5, (7, 1, 6, 3, 4))
    source_ids[2] = config.pad_id  # a sentence of nothing but padding
    target_ids[0, 3] = config.pad_id  # padding in the middle
    target_ids[:, 0] = config.bos_id
    check_steps(backend, config, random_weights(config), source_ids, target_ids)


def check_steps(backend, config, weights, source_ids, target_ids):
    whole = load_reference(config, weights)(source_ids, target_ids)
    stepwise = step_by_step(backend, load(backend, config, weights), source_ids, target_ids)
    assert np.linalg.norm(stepwise - whole) <= TOLERANCE * np.linalg.norm(whole)
    assert np.abs(stepwise - whole).max() <= TOLERANCE * np.abs(whole).max()


@pytest.mark.extended("searches", "jax", "tf")
def test_the_hypotheses_of_a_sentence_share_its_memory(backend):
    config, weights = lively()
    source_ids, target_ids = sources(config), sources(config, 5, (7,) * 15)
    whole = load_reference(config, weights)(source_ids.repeat(3, 0), target_ids)
    stepwise = step_by_step(backend, load(backend, config, weights), source_ids, target_ids)
    np.testing.assert_allclose(stepwise, whole, atol=TOLERANCE * np.abs(whole).max())


def test_a_step_shows_the_taps_of_its_position(backend):
    config, weights = lively()
    source_ids, target_ids = sources(config), sources(config, 5, (3,) * 5)
    expected = Recorder("target_embedding.**", "decoder.**", "logits")
    load_reference(config, weights)(source_ids, target_ids, tap=expected)
    model = load(backend, config, weights)
    cache = model.init_cache(source_ids, 4)
    for position in range(3):
        seen = Recorder()
        _, cache = model.decode_step(target_ids[:, position], cache, tap=seen)
    assert "decoder.layers.1.self_attention.weights" in seen
    for name, value in seen.items():
        ours, whole = backend.to_numpy(value), expected[name]
        if name.endswith(("self_attention.scores", "self_attention.weights")):
            ours, whole = ours[..., :3], whole[:, :, -1:]
        elif value.ndim == 4:
            whole = whole[:, :, -1:]
        else:
            whole = whole[:, -1:]
        np.testing.assert_allclose(ours, whole, atol=TOLERANCE * np.abs(whole).max(), err_msg=name)


@pytest.mark.parametrize("search", SEARCHES)
def test_the_reference_finds_the_same_without_a_cache(search):
    for seed in range(4):
        config, weights = lively(seed=seed)
        model, source_ids = load_reference(config, weights), sources(config, seed)
        options = {"max_length": 12, **({"num_hypotheses": 2} if search == "beam_search" else {})}
        find = getattr(reference_numpy, search)
        assert_same(find(model, source_ids, **options), find(model, source_ids, **options, use_cache=False))


# --- What is asked for. ---


@pytest.mark.parametrize("search", EITHER)
@REPEATED
def test_a_sentence_does_not_depend_on_its_batch(backend, search):
    config, weights = lively()
    model, source_ids = load(backend, config, weights), sources(config)
    find = getattr(backend.package, search)
    together = find(model, source_ids)  # at most the source length + 50, which differs
    for row, source in enumerate(source_ids):
        alone = find(model, source[None, source != config.pad_id])
        assert tokens_of(alone.ids[0], config) == tokens_of(together.ids[row], config)
        assert alone.scores[0] == pytest.approx(together.scores[row], rel=TOLERANCE)


@REPEATED
def test_the_maximum_length_follows_each_source(backend):
    config, weights = lively()
    weights["output_proj.bias"][config.eos_id] = -1e3  # it never ends by itself
    for find in (backend.package.greedy_search, backend.package.beam_search):
        found = find(load(backend, config, weights), sources(config))
        assert (found.ids != config.pad_id).sum(1).tolist() == [56, 54, 51, 55, 52]
    learned, weights = lively(position_encoding="learned", position_offset=3)
    weights["output_proj.bias"][config.eos_id] = -1e3
    found = backend.package.greedy_search(load(backend, learned, weights), sources(learned))
    assert found.ids.shape == (5, learned.max_positions)


@pytest.mark.parametrize("search", EITHER)
@REPEATED
def test_lengths_and_start_symbol(backend, search):
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
    # The first token read decides what follows.
    config, weights = lively()
    started = find(load(backend, config, weights), source_ids, max_length=6, start_id=7)
    same = find(load(backend, config.replace(bos_id=7), weights), source_ids, max_length=6)
    assert_same(started, same)
    assert started.ids.tolist() != find(load(backend, config, weights), source_ids, max_length=6).ids.tolist()


@pytest.mark.parametrize("search", EITHER)
@REPEATED
def test_padding_is_never_said(backend, search):
    for overrides in ({}, {"bos_id": 0}):  # the start symbol may be padding
        config, weights = lively(**overrides)
        weights["output_proj.bias"][config.pad_id] = 1e3
        found = getattr(backend.package, search)(load(backend, config, weights), sources(config), max_length=9)
        lengths = (found.ids != config.pad_id).sum(1)
        for row, length in zip(found.ids, lengths, strict=True):
            assert (row[:length] != config.pad_id).all()
            assert length == 9 or row[length - 1] == config.eos_id
        assert (found.scores < -900).all()  # the probability that padding takes is not given to others


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
    """Of a few logits, each many times over, where the best may not be looked for in one part only."""
    config, weights = lively(size=300)
    config = config.replace(eos_id=299)  # the last of all, and the likeliest
    weights = {name: np.zeros_like(array) for name, array in weights.items()}
    weights["output_proj.bias"][:] = np.random.default_rng(0).integers(2, size=300) / 2
    weights["output_proj.bias"][[40, 200]] = 1.0  # the first lies in a part with nothing better
    weights["output_proj.bias"][[5, 210, 290]] = 1.5
    weights["output_proj.bias"][config.eos_id] = 4.0
    for beam_size, length in ((1, 4), (3, 4), (7, 4), (7, 1)):
        options = {"beam_size": beam_size, "max_length": length, "num_hypotheses": beam_size}
        options["length_penalty"] = 3.0  # long ones win, whose beginning was not the best
        expected = reference_numpy.beam_search(load_reference(config, weights, dtype), sources(config), **options)
        found = backend.package.beam_search(load(backend, config, weights, dtype), sources(config), **options)
        np.testing.assert_array_equal(found.nbest_ids, expected.nbest_ids)
    weights["output_proj.bias"][config.eos_id] = 0.0
    best = backend.package.greedy_search(load(backend, config, weights, dtype), sources(config), 1)
    assert (best.ids == 5).all()  # the first of three


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_largest_of_many(port, count):
    """The same as the reference finds, whatever the number of blocks, of ties and of NaN."""
    ours, theirs = (
        search.FastBeam.top if hasattr(search, "FastBeam") else search._top
        for search in (import_module(f"{name}.search") for name in (port.package.__name__, "reference_numpy"))
    )
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
def test_bfloat16_adds_up_in_float32(port, search):
    """The score of one token is the float32 log-softmax of bfloat16 logits."""
    config, weights = lively()
    model = load(port, config, weights, "bfloat16")
    logits, _ = model.decode_step([config.bos_id] * 5, model.init_cache(sources(config), 1))
    log_probabilities = log_softmax(port.to_numpy(logits).astype(np.float64))
    found = getattr(port.package, search)(model, sources(config), max_length=1)
    np.testing.assert_allclose(found.scores, log_probabilities[np.arange(5), found.ids[:, 0]], rtol=1e-5)


@pytest.mark.parametrize("search", EITHER)
@pytest.mark.extended("searches", "tf")
def test_each_step_is_shown(backend, search):
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


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=REPEATED)])
def test_types_of_the_result(backend, dtype):
    _check_types(backend, dtype)


@REPEATED
def test_types_of_the_result_in_bfloat16(port):
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
        found.nbest_ids[:] = 0  # it belongs to the caller


@pytest.mark.extended("searches", "jax", "tf")
def test_float32_agrees_with_the_reference(backend):
    config, weights = lively()
    for search in SEARCHES:
        expected = getattr(reference_numpy, search)(load_reference(config, weights), sources(config), max_length=10)
        found = getattr(backend.package, search)(
            load(backend, config, weights, "float32"), sources(config), max_length=10
        )
        assert_same(found, expected, 1e-5)


# --- Bad input: the same words everywhere. ---

BAD = {
    "beam_size": [
        (0, ValueError, "beam_size must be at least 1: got 0"),
        (2.0, TypeError, "beam_size must be an integer: got 2.0"),
        (True, TypeError, "beam_size must be an integer: got True"),
    ],
    "num_hypotheses": [
        (0, ValueError, "num_hypotheses must be at least 1: got 0"),
        (5, ValueError, "num_hypotheses must be at most beam_size: got 5 and 4"),
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
        (27, ValueError, "max_length must be at most 26, the model's positions: got 27"),
        ("9", TypeError, "max_length must be an integer: got '9'"),
    ],
    "min_length": [
        (0, ValueError, "min_length must be at least 1: got 0"),
        (27, ValueError, "min_length must be at most max_length: got 27 and 26"),
    ],
    "start_id": [
        (-1, ValueError, "start_id must be at least 0: got -1"),
        (13, ValueError, "start_id must lie in [0, 13): got 13"),
    ],
    "source_ids": [
        ([[3, 13]], ValueError, "source_ids must lie in [0, 13): got 13 at [0, 1]"),
        (np.zeros((0, 3), int), ValueError, "source_ids must hold at least one token: got shape (0, 3)"),
        (np.zeros((2, 0), int), ValueError, "source_ids must hold at least one token: got shape (2, 0)"),
        (np.ones((1, 27), int), ValueError, "source_ids must be at most 26 tokens long: got 27"),
        ([[1.0]], TypeError, "source_ids must be integers: got float64"),
    ],
    "source_mask": [
        (np.ones((2, 3)), TypeError, "source_mask must be boolean, True where attention is allowed: got float64")
    ],
}


@pytest.fixture(scope="module")
def limited(backend):
    """Return a model with 26 positions."""
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
def test_bad_input_is_refused_with_the_same_words(backend, limited, search, name, value, error, message):
    options = {"source_ids": [[3, 4, 5], [6, 7, 8]], name: value}
    with pytest.raises(error) as caught:
        getattr(backend.package, search)(limited, options.pop("source_ids"), **options)
    assert str(caught.value) == message


def test_lengths_that_contradict_each_other(backend):
    model = load(backend, *lively())
    for find in (backend.package.greedy_search, backend.package.beam_search):
        with pytest.raises(ValueError, match="min_length must be at most max_length: got 6 and 5"):
            find(model, [[3, 4]], min_length=6, max_length=5)
        with pytest.raises(ValueError, match="min_length must be at most max_length: got 60 and 52"):
            find(model, [[3, 4]], min_length=60)


def test_a_model_without_an_end(backend):
    model = load(backend, *lively(eos_id=0))
    for find in (backend.package.greedy_search, backend.package.beam_search):
        with pytest.raises(ValueError, match="a search needs an end symbol that is not padding: both are 0"):
            find(model, [[3, 4]])


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("size", [13, pytest.param(300, marks=REPEATED)])
def test_a_model_that_computes_nan(backend, size):
    config, weights = lively(size=size)
    weights["decoder.final_norm.scale"][:] = 1e30
    weights["output_proj.kernel"][:] = 1e30
    model = load(backend, config, weights, "float32")
    for find, score in ((backend.package.greedy_search, "nan"), (backend.package.beam_search, "inf")):
        message = f"a hypothesis must have a finite score: the best of sentence 0 has {score}"
        with pytest.raises(ValueError, match=f"^{message}$"):
            find(model, [[3, 4]], max_length=3)


def test_bad_steps_are_refused_with_the_same_words(backend, limited):
    source_ids = [[3, 4, 5], [6, 7, 8]]
    for options, error, message in (
        ({"capacity": 0}, ValueError, "capacity must be at least 1: got 0"),
        ({"capacity": 27}, ValueError, "capacity must be at most 26, the model's positions: got 27"),
        ({"capacity": 2.5}, TypeError, "capacity must be an integer: got 2.5"),
        ({"capacity": 4, "beam_size": 0}, ValueError, "beam_size must be at least 1: got 0"),
    ):
        with pytest.raises(error) as caught:
            limited.init_cache(source_ids, **options)
        assert str(caught.value) == message
    cache = limited.init_cache(source_ids, 1, beam_size=2)
    for ids, error, message in (
        ([1, 1], ValueError, "target_ids must have shape (4,): got (2,)"),
        ([1, 1, 1, 13], ValueError, "target_ids must lie in [0, 13): got 13 at [0, 3]"),
        ([1.0] * 4, TypeError, "target_ids must be integers: got float64"),
    ):
        with pytest.raises(error) as caught:
            limited.decode_step(ids, cache)
        assert str(caught.value) == message
    _, cache = limited.decode_step([1, 1, 1, 1], cache)
    with pytest.raises(ValueError, match="the cache must have room for the next target position: all 1 are taken"):
        limited.decode_step([1, 1, 1, 1], cache)
