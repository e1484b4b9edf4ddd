"""Attention to long inputs in blocks of queries: the same numbers, and memory that grows with the length only."""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
import pytest
from conftest import random_weights, tiny_config

import reference_numpy as ref
from reference_numpy import attention


def look(name, value):
    """Take the path on which all scores are there at the same time, since somebody looks."""
    return value


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def masks(batch, heads, length, memory_length):
    """Return masks of all the shapes that attention takes; in the first, a row is all False."""
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
def test_blocks_change_nothing(shape, length, rate, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    query, key, value = random(2, 3, length, 5), random(2, 3, 7, 5, seed=1), random(2, 3, 7, 6, seed=2)
    mask = masks(2, 3, length, 7)[shape]

    def attend(tap):
        thin_out = partial(ref.Dropout(rate), rng=np.random.default_rng(4))
        return ref.scaled_dot_product_attention(query, key, value, mask, thin_out, tap)

    np.testing.assert_allclose(attend(ref.no_tap), attend(look), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_blocks_of_the_usual_size(dtype):
    length = 2 * attention.QUERY_BLOCK + 37
    query, key, value = (random(1, 2, length, 8, seed=seed).astype(dtype) for seed in range(3))
    mask = masks(1, 2, length, length)["both"]
    in_blocks = ref.scaled_dot_product_attention(query, key, value, mask)
    assert in_blocks.dtype == dtype
    at_once = ref.scaled_dot_product_attention(query, key, value, mask, tap=look)
    np.testing.assert_allclose(in_blocks, at_once, rtol=0.0, atol=8 * np.finfo(dtype).eps)


def test_a_model_reads_long_sentences(monkeypatch):
    config = tiny_config("marian", max_length=64)
    model = ref.Transformer.from_weights(config, random_weights(config), "float64")
    source, target = (np.random.default_rng(0).integers(3, 30, (2, length)) for length in (33, 21))
    source[1, 20:] = config.pad_id
    expected = model(source, target)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    np.testing.assert_allclose(model(source, target), expected, rtol=1e-13, atol=1e-13)
    seen = ref.Recorder()
    model(source, target, tap=seen)  # whoever looks sees all scores
    assert seen["encoder.layers.0.self_attention.scores"].shape == (2, config.num_heads, 33, 33)


def test_memory_grows_with_the_length():
    def peak(length, tap=ref.no_tap):
        query, key, value = (random(1, 2, length, 8, seed=seed).astype(np.float32) for seed in range(3))
        mask = np.ones((1, 1, 1, length), bool)
        tracemalloc.start()
        try:
            ref.scaled_dot_product_attention(query, key, value, mask, tap=tap)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    short, long = 4 * attention.QUERY_BLOCK, 8 * attention.QUERY_BLOCK
    assert peak(long) < 2.2 * peak(short)
    assert peak(long, look) > 3.5 * peak(short, look)
    assert peak(long) < 0.1 * peak(long, look)
