"""Keras and TensorFlow functions around a model and a search: tracing only once, XLA, saving, and loading."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import tiers
from conftest import assert_same_bits, random_weights
from native_models import SOURCE, TARGET, assert_close, build


@pytest.mark.only("tf")
def test_tf_function_traces_once(port):
    import tensorflow as tf

    model = build(port)
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)] * 2)
    def call(source_ids, target_ids):
        traces.append(1)
        return model(source_ids, target_ids)

    for source, target in ((SOURCE, TARGET), (SOURCE[:1], TARGET[:1, :2]), (SOURCE[:, :3], SOURCE)):
        expected = port.to_numpy(model(source, target))
        assert_close(port.to_numpy(call(source.astype(np.int32), target.astype(np.int32))), expected)
    assert traces == [1]


@pytest.mark.only("tf")
def test_tf_xla_compiled_call_matches_the_plain_call(port):
    import tensorflow as tf

    model = build(port, position_encoding="learned")
    compiled = tf.function(lambda *ids: model(*ids), jit_compile=True)
    assert_close(
        port.to_numpy(compiled(tf.constant(SOURCE), tf.constant(TARGET))), port.to_numpy(model(SOURCE, TARGET))
    )


@pytest.mark.only("tf")
def test_tf_cache_can_be_passed_through_a_function(port):
    """A cache can be passed through a step, which is traced only once, or through the body of a compiled loop."""
    import tensorflow as tf

    model, traces = build(port), []
    expected = port.to_numpy(model(SOURCE, TARGET))

    @tf.function
    def step(target_ids, cache):
        traces.append(target_ids.shape)
        return model.decode_step(target_ids, cache)

    cache = model.init_cache(SOURCE, 3)
    for position in range(3):
        logits, cache = step(tf.constant(TARGET[:, position]), cache)
        assert_close(port.to_numpy(logits), expected[:, position])
    assert traces == [(2,)]
    with pytest.raises(ValueError, match="all 3 positions are in use"):
        model.decode_step(TARGET[:, 0], cache)

    @tf.function(jit_compile=True)
    def loop(source_ids, target_ids):
        def step_of_loop(cache, logits):
            new, cache = model.decode_step(target_ids[:, cache.length], cache)
            return cache, tf.tensor_scatter_nd_update(logits, [[cache.length - 1]], new[None])

        start = model.init_cache(source_ids, 3), tf.zeros([3, 2, 37], tf.float64)
        return tf.while_loop(lambda cache, logits: cache.length < 3, step_of_loop, start)[1]

    logits = loop(tf.constant(SOURCE), tf.constant(TARGET))
    assert_close(port.to_numpy(logits), expected.swapaxes(0, 1))


@pytest.mark.only("tf")
@pytest.mark.parametrize("search", tiers.first_alone(["beam_search", "greedy_search"], "searches"))
def test_tf_traces_a_search_once(port, search, monkeypatch):
    """Different lengths, limits, weights, and batch sizes, and callbacks don't trigger a recompilation."""
    import tensorflow as tf

    model, find, encoded, traces, sizes = build(port), getattr(port.package, search), [], [], set()
    three = np.concatenate([SOURCE, SOURCE[:1]])
    four_and_longer = np.pad(three, ((0, 1), (0, 2)), constant_values=7)
    encode, decode_step, call = type(model)._encode, model.decode_step, port.package.search_loop.call_traced

    def traced_decode_step(model, *args):
        traces.append(args)
        return decode_step(*args)

    def traced_encode(model, *args, **options):
        encoded.append(args)
        return encode(model, *args, **options)

    def sized_call(function, model, *args, **options):
        sizes.add((function, *(tuple(np.shape(x)) for x in tf.nest.flatten(args))))
        return call(function, model, *args, **options)

    monkeypatch.setattr(type(model), "decode_step", traced_decode_step)
    monkeypatch.setattr(type(model), "_encode", traced_encode)
    monkeypatch.setattr(port.package.search_loop, "call_traced", sized_call)
    first = find(model, three, max_length=9)
    assert (len(encoded), len(traces), len(sizes)) == (1, 1, 2)  # the encoder and the loop
    find(model, four_and_longer, max_length=9)
    find(model, three, max_length=12, min_length=4, start_id=5)
    find(model, three, max_length=9, on_step=lambda ids: None)
    port.package.set_weights(model, random_weights(model.config, seed=1))
    other = find(model, three, max_length=9)
    assert (other.scores != first.scores).all()
    if search == "beam_search":
        find(model, three, max_length=9, length_penalty=1.0, length_penalty_kind="power")
    assert (len(encoded), len(traces), len(sizes)) == (1, 1, 2)
    find(model, three, max_length=33)  # the loop is recompiled but not retraced
    if search == "beam_search":
        find(model, three, max_length=9, beam_size=2)
    assert (len(encoded), len(traces), len(sizes)) == (1, 1, 3 if search == "greedy_search" else 4)


@pytest.mark.only("tf")
def test_tf_traced_functions_do_not_keep_a_model_alive(port):
    """Traced functions neither keep their model alive nor are copied with it."""
    model = build(port)
    port.package.greedy_search(model, SOURCE, max_length=2)
    twin, alive = copy.deepcopy(model), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert port.package.greedy_search(twin, SOURCE, max_length=2).ids.shape == (2, 2)


@pytest.mark.only("tf")
@pytest.mark.parametrize("tie_embeddings", ["none", "all"])
def test_tf_saved_file_loads_with_the_same_config_and_weights(port, tmp_path, tie_embeddings):
    import keras

    model = build(port, tie_embeddings=tie_embeddings, final_norm=True, output_bias=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert_same_bits(loaded.export_weights(), model.export_weights())
    np.testing.assert_array_equal(port.to_numpy(loaded(SOURCE, TARGET)), port.to_numpy(model(SOURCE, TARGET)))
