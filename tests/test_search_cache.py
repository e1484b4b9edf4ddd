"""Decoding with a cache: each step matches a forward pass for the full prefix."""

from __future__ import annotations

import numpy as np
import pytest
import tiers
from conftest import random_weights, tiny_config
from search_models import REPEATED, SEARCHES, TOLERANCE, assert_same, lively, load, load_reference, sources
from search_models import _quick as _quick  # a fixture of every test

import reference_numpy
from reference_numpy import Recorder
from transformer_parity.transformer.cases.standard import preset_case

# --- The cache. ---


def step_by_step(backend, model, source_ids, target_ids):
    """Return the logits at each position, decoded one token at a time."""
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
def test_cached_steps_match_uncached_steps(backend, preset):
    case = preset_case(preset)
    assert (case.inputs["source_ids"] == case.config.pad_id).any()
    weights = random_weights(case.config)
    check_steps(backend, case.config, weights, case.inputs["source_ids"], case.inputs["target_ids"][:, :3])


@pytest.mark.parametrize("beam_size", [1, 2])
def test_decode_step_accepts_multiple_tokens(backend, beam_size):
    """Decoding a prefix, one token, and two tokens matches a forward pass, including padding within the target."""
    config, weights = lively(skip_first_self_attention=True, num_decoder_layers=2)
    model, source_ids = load(backend, config, weights), sources(config)
    target_ids = np.random.default_rng(1).integers(3, 13, (5 * beam_size, 6))
    target_ids[1, 2] = config.pad_id
    cache, found = model.init_cache(source_ids, 6, beam_size), []
    for tokens in (target_ids[:, :3], target_ids[:, 3], target_ids[:, 4:]):
        logits, cache = model.decode_step(tokens, cache)
        assert tuple(logits.shape) == (*tokens.shape, 13)
        found.append(backend.to_numpy(logits).reshape(len(tokens), -1, 13))
    whole = backend.to_numpy(model(source_ids.repeat(beam_size, 0), target_ids))
    np.testing.assert_allclose(np.concatenate(found, 1), whole, rtol=1e-11, atol=1e-12)


def test_append_to_a_full_cache_raises_value_error(backend):
    """Beyond the capacity, a position would be dropped or overwrite another one."""
    config, weights = lively()
    cache = load(backend, config, weights).init_cache(sources(config), 3).past[0]
    keys, values = (backend.from_numpy(np.ones((5, config.num_heads, 3, d))) for d in (config.d_k, config.d_v))
    kept = cache.append(keys, values)
    assert kept.key.shape[1] == config.num_heads
    with pytest.raises(ValueError, match=r"the cache must have room for 4 positions in total \(3 are in use\): got 3"):
        cache.append(keys[:, :, :1], values[:, :, :1])
    assert cache.length == 3


def test_decode_step_returns_a_new_cache_or_consumes_the_given_one(backend):
    """JAX and TensorFlow don't modify the given cache. NumPy and PyTorch update it in place."""
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
def test_cached_decoding_matches_uncached_under_all_conventions(backend, variant):
    config = tiny_config(**VARIANTS[variant])
    source_ids, target_ids = sources(config), sources(config, 5, (7, 1, 6, 3, 4))
    source_ids[2] = config.pad_id  # a sentence that contains only padding
    target_ids[0, 3] = config.pad_id  # padding in the middle
    target_ids[:, 0] = config.bos_id
    check_steps(backend, config, random_weights(config), source_ids, target_ids)


def check_steps(backend, config, weights, source_ids, target_ids):
    whole = load_reference(config, weights)(source_ids, target_ids)
    stepwise = step_by_step(backend, load(backend, config, weights), source_ids, target_ids)
    assert np.linalg.norm(stepwise - whole) <= TOLERANCE * np.linalg.norm(whole)
    assert np.abs(stepwise - whole).max() <= TOLERANCE * np.abs(whole).max()


@pytest.mark.extended("searches", "jax", "tf")
def test_hypotheses_of_a_sentence_share_the_encoder_memory(backend):
    config, weights = lively()
    source_ids, target_ids = sources(config), sources(config, 5, (7,) * 15)
    whole = load_reference(config, weights)(source_ids.repeat(3, 0), target_ids)
    stepwise = step_by_step(backend, load(backend, config, weights), source_ids, target_ids)
    np.testing.assert_allclose(stepwise, whole, atol=TOLERANCE * np.abs(whole).max())


def test_decode_step_records_the_taps_of_its_position(backend):
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
def test_reference_search_without_cache_gives_the_same_result(search):
    for seed in range(4):
        config, weights = lively(seed=seed)
        model, source_ids = load_reference(config, weights), sources(config, seed)
        options = {"max_length": 12, **({"num_hypotheses": 2} if search == "beam_search" else {})}
        find = getattr(reference_numpy, search)
        assert_same(find(model, source_ids, **options), find(model, source_ids, **options, use_cache=False))
