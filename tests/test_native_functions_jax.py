"""JAX transformations of a model and a search: jit, split and merge, taps under jit, and compiling only once."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tiers
from conftest import assert_same_bits, random_weights
from native_models import NO_DROPOUT, SOURCE, TARGET, assert_close, build

from reference_numpy import Recorder, parameter_shapes, tap_shapes


@pytest.mark.only("jax")
def test_jax_jitted_call_matches_the_plain_call(port):
    """A jitted call is traced once per mode and returns the same values as the plain call."""
    from flax import nnx

    model = build(port, dropout={**NO_DROPOUT, "residual": 0.5})
    traces = []

    @nnx.jit
    def call(model, source_ids, target_ids):
        traces.append(source_ids.shape)
        return model(source_ids, target_ids)

    for _ in range(2):
        assert_close(port.to_numpy(call(model, SOURCE, TARGET)), port.to_numpy(model(SOURCE, TARGET)))
    model.train()
    first, second = (port.to_numpy(call(model, SOURCE, TARGET)) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3  # the jitted call advanced the model's random state
    assert traces == [(2, 4), (2, 4)]


@pytest.mark.only("jax")
def test_jax_dropout_layers_have_independent_masks(port):
    """Each dropout layer has its own key. Layers with identical masks would regularize less."""
    import jax
    from flax import nnx

    dropouts = [module for _, module in nnx.iter_modules(build(port)) if isinstance(module, nnx.Dropout)]
    keys = {tuple(jax.random.key_data(module.rngs.key.get_value()).tolist()) for module in dropouts}
    assert len(keys) == len(dropouts) > 5


@pytest.mark.only("jax")
def test_jax_split_and_merge_preserve_weights_and_ties(port):
    import jax
    from flax import nnx

    model = build(port, tie_embeddings="all")
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    assert len(jax.tree.leaves(parameters)) == len(parameter_shapes(model.config))
    merged = nnx.merge(graph, parameters, rest)
    assert merged.source_embedding is merged.target_embedding
    assert_same_bits(merged.export_weights(), model.export_weights())
    doubled = nnx.merge(graph, jax.tree.map(lambda x: 2 * x, parameters), rest)
    expected = {name: 2 * array for name, array in model.export_weights().items()}
    assert_same_bits(doubled.export_weights(), expected)


@pytest.mark.only("jax")
def test_jax_taps_can_be_recorded_under_jit(port):
    """A recorder created inside a traced function can return its values together with the result."""
    from flax import nnx

    model = build(port)

    @nnx.jit
    def call(model, source_ids, target_ids):
        seen = Recorder()
        return model(source_ids, target_ids, tap=seen), dict(seen)

    logits, taps = call(model, SOURCE, TARGET)
    expected = Recorder()
    model(SOURCE, TARGET, tap=expected)
    assert {name: value.shape for name, value in taps.items()} == tap_shapes(model.config, 2, 4, 3)
    for name, value in taps.items():
        assert_close(port.to_numpy(value), port.to_numpy(expected[name]))
    assert_close(port.to_numpy(logits), port.to_numpy(expected["logits"]))


@pytest.mark.only("jax")
def test_jax_cache_can_be_passed_through_jit(port):
    """A cache can be passed through a step, which is compiled only once, or through the body of a loop."""
    import jax
    from flax import nnx

    model, traces = build(port), []
    expected = port.to_numpy(model(SOURCE, TARGET))

    @nnx.jit
    def step(model, target_ids, cache):
        traces.append(target_ids.shape)
        return model.decode_step(target_ids, cache)

    cache = model.init_cache(SOURCE, 3)
    for position in range(3):
        logits, cache = step(model, TARGET[:, position], cache)
        assert_close(port.to_numpy(logits), expected[:, position])
    assert traces == [(2,)]
    with pytest.raises(ValueError, match="all 3 positions are in use"):
        model.decode_step(TARGET[:, 0], cache)

    def step_of_loop(cache, target_ids):
        logits, cache = model.decode_step(target_ids, cache)
        return cache, logits

    _, logits = jax.lax.scan(step_of_loop, model.init_cache(SOURCE, 3), TARGET.T)
    assert_close(port.to_numpy(logits), expected.swapaxes(0, 1))


@pytest.mark.only("jax")
def test_jax_donated_cache_leaves_the_model_unchanged(port):
    model = build(port, position_encoding="learned")
    cache = model.init_cache(SOURCE, model.config.max_length)
    assert cache.positions is not model.target_position.embedding.get_value()
    cache.positions.delete()  # as donation does
    assert model(SOURCE, TARGET).shape[:2] == TARGET.shape


@pytest.mark.only("jax")
def test_jax_reorders_a_cache(port):
    rng, rows = np.random.default_rng(0), np.array([2, 2, 0, 3])
    before = [rng.normal(size=(4, 2, 7, width)) for width in (3, 5)]
    cache = port.package.KeyValueCache(*map(port.from_numpy, before), 6)
    cache.reorder(port.from_numpy(rows))
    for array, kept in zip((cache.key, cache.value), before, strict=True):
        np.testing.assert_array_equal(port.to_numpy(array), kept[rows])


@pytest.mark.only("jax")
@pytest.mark.parametrize("search", tiers.first_alone(["beam_search", "greedy_search"], "searches"))
def test_jax_compiles_a_search_once(port, search, caplog):
    """Different lengths, limits, weights, and batch sizes, and callbacks don't trigger a recompilation."""
    import jax

    model, find = build(port), getattr(port.package, search)
    three = np.concatenate([SOURCE, SOURCE[:1]])
    four_and_longer = np.pad(three, ((0, 1), (0, 2)), constant_values=7)
    find(model, three, max_length=9)
    with caplog.at_level(logging.DEBUG, "jax"), jax.log_compiles():
        find(model, four_and_longer, max_length=9)
        find(model, three, max_length=12, min_length=4, start_id=5)
        find(model, three, max_length=9, on_step=lambda ids: None)
        port.package.set_weights(model, random_weights(model.config, seed=1))
        find(model, three, max_length=9)
        if search == "beam_search":
            find(model, three, max_length=9, length_penalty=1.0, length_penalty_kind="power")
        assert "Compiling" not in caplog.text
        find(model, three, max_length=33)
        assert "Compiling" in caplog.text  # shows that compilations are logged
