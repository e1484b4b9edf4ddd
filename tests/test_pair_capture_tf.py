"""Captures of Keras models: stable names of layers, masks of replaced values, and compiled code."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Backend
from test_pair_capture import Replay, X

from transformer_parity.pair import capture


@pytest.fixture
def keras():
    _ = Backend("tf").package
    import keras

    return keras


def functional(keras):
    inputs = keras.Input((5, 3))
    x = keras.layers.Dense(3)(inputs)
    x = keras.layers.Dense(3, name="mine")(x) + x
    x = keras.Sequential([keras.layers.Dense(3), keras.layers.ReLU(), keras.layers.Dense(3, name="dense")])(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def test_functional_and_sequential_models_have_stable_names(keras):
    keras.layers.Dense(3)
    names = [
        "dense",
        "mine",
        *(f"sequential.{name}" for name in ("dense", "re_lu", "dense_1")),
        "sequential",
        "dense_1",
    ]
    for _ in range(2):
        model, seen = functional(keras), Replay()
        with capture.keras(model, seen):
            out = model(X)
        assert [*seen] == names
        assert np.array_equal(seen["dense_1"], out)


def test_layers_that_the_first_call_creates_are_shown(keras):
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self._self_attention = keras.layers.MultiHeadAttention(2, 2)
            self.parts = {"rnn": keras.layers.LSTM(2, return_sequences=True)}

        def call(self, x):
            return self.parts["rnn"](self._self_attention(x, x))

    block, first, second = Block(), Replay(), Replay()
    for seen in (first, second):
        with capture.keras(block, seen):
            block(X)
    inner = [f"_self_attention._{part}_dense" for part in ("query", "key", "value", "output")]
    assert [*first] == [*second] == [*inner, "_self_attention", "parts.rnn"]


def test_replaced_values_keep_their_masks(keras):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn = keras.layers.Embedding(5, 4, mask_zero=True), keras.layers.LSTM(3)

        def call(self, ids):
            return self.rnn(self.embedding(ids))

    model = Model()
    ids = np.array([[1, 2, 0], [3, 0, 0]])
    before = model(ids)
    with capture.keras(model, lambda name, value: value * 1):
        after = model(ids)
    assert np.array_equal(before, after)


def test_models_that_run_in_compiled_code_raise(keras):
    model = functional(keras)
    for _ in range(2):
        with pytest.raises(ValueError, match="without predict"), capture.keras(model, Replay()):
            model.predict_on_batch(X)
