"""Attention computes long inputs in blocks of queries, with the same results and with memory linear in the length."""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
import pytest
from conftest import random_weights, tiny_config

import reference_numpy as ref
from reference_numpy import fast
from reference_numpy.fast import attend


def look(name, value):
    """Return a value unchanged; any tap selects the code path that computes all scores at once."""
    return value


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def masks(batch, heads, length, memory_length):
    """Return masks of every supported shape; in the first one, a row is all False."""
    allowed = random(batch, heads, length, memory_length, seed=3) < 0.5
    allowed[0, 0, length // 2] = False
    padding = allowed[:, :1, :1] | (np.arange(memory_length) == 0)
    causal = np.tri(length, memory_length, dtype=bool)
    return {
        "every head": allowed,
        "padding": padding,
        "causal": causal[None, None],
        "both": causal & padding,
        "none": None,
    }


@pytest.mark.parametrize("shape", ["every head", "padding", "causal", "both", "none"])
@pytest.mark.parametrize("length", [5, 8, 9, 12])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_query_blocks_do_not_change_attention(shape, length, rate, monkeypatch):
    monkeypatch.setattr(fast, "QUERY_BLOCK", 4)
    query, key, value = random(2, 3, length, 5), random(2, 3, 7, 5, seed=1), random(2, 3, 7, 6, seed=2)
    mask = masks(2, 3, length, 7)[shape]

    def attended(tap):
        thin_out = partial(ref.Dropout(rate), rng=np.random.default_rng(4))
        return attend(query, key, value, mask, thin_out, tap)

    np.testing.assert_allclose(attended(ref.no_tap), attended(look), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_default_block_size_does_not_change_attention(dtype):
    length = 2 * fast.QUERY_BLOCK + 37
    query, key, value = (random(1, 2, length, 8, seed=seed).astype(dtype) for seed in range(3))
    mask = masks(1, 2, length, length)["both"]
    in_blocks = attend(query, key, value, mask)
    assert in_blocks.dtype == dtype
    at_once = attend(query, key, value, mask, tap=look)
    np.testing.assert_allclose(in_blocks, at_once, rtol=0.0, atol=8 * np.finfo(dtype).eps)


def test_blocks_do_not_change_the_logits_of_long_sentences(monkeypatch):
    config = tiny_config("marian", max_length=64)
    model = ref.Transformer.from_weights(config, random_weights(config), "float64")
    source, target = (np.random.default_rng(0).integers(3, 30, (2, length)) for length in (33, 21))
    source[1, 20:] = config.pad_id
    expected = model(source, target)
    monkeypatch.setattr(fast, "QUERY_BLOCK", 8)
    np.testing.assert_allclose(model(source, target), expected, rtol=1e-13, atol=1e-13)
    seen = ref.Recorder()
    model(source, target, tap=seen)  # with a tap, all scores are computed
    assert seen["encoder.layers.0.self_attention.scores"].shape == (2, config.num_heads, 33, 33)


def test_attention_memory_is_linear_in_the_length():
    def peak(length, tap=ref.no_tap):
        query, key, value = (random(1, 2, length, 8, seed=seed).astype(np.float32) for seed in range(3))
        mask = np.ones((1, 1, 1, length), bool)
        tracemalloc.start()
        try:
            attend(query, key, value, mask, tap=tap)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    short, long = 4 * fast.QUERY_BLOCK, 8 * fast.QUERY_BLOCK
    assert peak(long) < 2.2 * peak(short)
    assert peak(long, look) > 3.5 * peak(short, look)
    assert peak(long) < 0.1 * peak(long, look)


SHAPES = ["both", *(pytest.param(shape, marks=pytest.mark.extended("masks")) for shape in ("every head", "none"))]


def seen_scores(monkeypatch, attention):
    """Return a list to which each call of the softmax appends the shape of its scores."""
    shapes, softmax = [], attention.masked_softmax

    def record(scores, mask):
        shapes.append(tuple(scores.shape))
        return softmax(scores, mask)

    monkeypatch.setattr(attention, "masked_softmax", record)
    return shapes


def in_blocks_of(port, monkeypatch=None, queries=None):
    """Return a port's fast attention, with a different number of queries per block if specified."""
    if queries is not None:
        monkeypatch.setattr(port.package.fast, "QUERY_BLOCK", queries)
    return port.package.fast.attend_by_blocks


def context_and_gradients(name, attention, arrays, mask, **given):
    """Return the context of a port's compiled attention, and its gradients with respect to query, key, and value."""

    def attend(*arrays):
        return attention(*arrays, mask, **given)

    if name == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)

        def loss(arrays):
            context = attend(*arrays)
            return (context**2).sum(), context

        gradient, context = jax.jit(jax.grad(loss, has_aux=True))(arrays)
        return [context, *gradient]
    import tensorflow as tf

    arrays, mask = [tf.constant(x) for x in arrays], None if mask is None else tf.constant(mask)

    @tf.function(autograph=False)
    def differentiate(*arrays):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            context = attend(*arrays)
            loss = tf.reduce_sum(context**2)
        return [context, *tape.gradient(loss, arrays)]

    return differentiate(*arrays)


@pytest.mark.only("jax", "tf")  # PyTorch's own kernel doesn't store the scores
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_a_port_in_blocks_matches_full_attention(port, shape, monkeypatch):
    attention = in_blocks_of(port, monkeypatch, 4)
    shapes = seen_scores(monkeypatch, port.package.attention)
    arrays = random(2, 3, 9, 5), random(2, 3, 7, 5, seed=1), random(2, 3, 7, 6, seed=2)
    mask = masks(2, 3, 9, 7)[shape]
    in_blocks = context_and_gradients(port.name, attention, arrays, mask)
    # JAX also traces the branch for GPUs, but runs only the branch that computes in blocks.
    assert set(shapes) - ({(2, 3, 9, 7)} if port.name == "jax" else set()) == {(1, 1, 4, 7)}
    shapes.clear()
    at_once = context_and_gradients(port.name, attention, arrays, mask, tap=look)
    assert set(shapes) == {(2, 3, 9, 7)}
    for found, expected in zip(in_blocks, at_once, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-14, atol=1e-14)


@pytest.mark.only("jax", "tf")
def test_attention_dropout_is_not_computed_in_blocks(port, monkeypatch):
    config = tiny_config("marian", dropout=ref.DropoutRates(attention=0.4))
    options = {"rngs": 0} if port.name == "jax" else {}
    model = port.package.Transformer.from_weights(config, random_weights(config), **options)
    in_blocks_of(port, monkeypatch, 4)
    shapes = seen_scores(monkeypatch, port.package.attention)
    block, x = model.encoder.layers[0].self_attention, random(2, 9, config.d_model).astype("float32")
    if port.name == "jax":
        import jax.numpy as jnp

        inference, x = block(jnp.asarray(x), jnp.asarray(x)), jnp.asarray(x)
        block.train()
        training = block(x, x)
    else:
        import tensorflow as tf

        x = tf.constant(x)
        inference, training = block(x, x), block(x, x, training=True)
    assert set(shapes[:-1]) == {(1, 1, 4, 9)}
    assert shapes[-1] == (2, config.num_heads, 9, 9)
    assert np.abs(np.asarray(inference) - np.asarray(training)).max() > 0.1


@pytest.mark.only("jax")
@pytest.mark.parametrize("passes", ["forward", "and backward"])
def test_jax_allocates_memory_for_only_one_block(port, passes):
    import jax

    attention, length = in_blocks_of(port), 1024
    shape = jax.ShapeDtypeStruct((1, 4, length, 8), "float32")
    mask = jax.ShapeDtypeStruct((1, 1, 1, length), "bool")

    def needed(**given):
        def total(arrays, mask):
            return (attention(*arrays, mask, **given) ** 2).sum()

        function = total if passes == "forward" else jax.grad(total)
        return jax.jit(function).lower((shape, shape, shape), mask).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * length * length * 4
    assert needed(tap=look) >= scores
    assert needed() < 0.3 * scores


@pytest.mark.only("tf")
@pytest.mark.extended("compiled programs")
def test_tf_program_contains_no_array_of_all_scores(port):
    import tensorflow as tf

    attention, length = in_blocks_of(port), 640
    inputs = [tf.zeros([1, 2, length, 8])] * 3

    def program(**given):
        def attend(*inputs):
            return attention(*inputs, **given)

        compiled = tf.function(attend, autograph=False, jit_compile=True)
        return compiled.experimental_get_compiler_ir(*inputs)(stage="optimized_hlo")

    assert f"{length},{length}" in program(tap=look)
    assert f"{length},{length}" not in program()
