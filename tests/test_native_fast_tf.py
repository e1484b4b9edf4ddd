"""TensorFlow's two switches: ``fast``, which belongs to a model, and the ``quick_compilation`` context."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import tiers
from conftest import random_weights, tiny_config
from native_models import BATCH, SETTINGS, SOURCE, assert_close, build

pytestmark = pytest.mark.only("tf")
CONFIG = tiny_config(num_encoder_layers=1, num_decoder_layers=1)


def is_fast(port, model):
    """Return whether a model uses ``fast.py``, after checking that its flag and its attention agree."""
    attends = {block.attend for block in model._flatten_layers() if isinstance(block, port.package.MultiHeadAttention)}
    assert attends == {port.package.fast.attend_by_blocks if model.fast else port.package.scaled_dot_product_attention}
    return model.fast


@pytest.fixture
def asked(monkeypatch):
    """Return a list that receives the ``jit_compile`` argument of each function that TensorFlow traces."""
    import tensorflow as tf

    function, asked = tf.function, []

    def record(*args, **options):
        asked.append(options["jit_compile"])
        return function(*args, **options)

    monkeypatch.setattr(tf, "function", record)
    return asked


@pytest.mark.parametrize("fast", [True, False])
def test_fast_flag_is_preserved_by_copies_and_saved_models(port, fast, tmp_path):
    """Keras creates copies from the constructor's arguments, so each copy must apply the ``fast`` flag itself."""
    import keras

    model = port.package.Transformer(CONFIG, fast=fast)
    model.save(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    again = port.package.Transformer.from_config(model.get_config())
    for one in (model, clone, again, copy.deepcopy(model), keras.models.load_model(tmp_path / "model.keras")):
        assert is_fast(port, one) == fast
    weights = random_weights(CONFIG)
    for part in ("Transformer", "Encoder", "Decoder"):
        assert is_fast(port, getattr(port.package, part).from_weights(CONFIG, weights, fast=fast)) == fast
        assert is_fast(port, getattr(port.package, part).from_weights(CONFIG, weights))


def test_plain_model_runs_eagerly_unless_compiled(port, asked):
    """A trainer traces a model with ``fast=False`` only if ``compile=True`` is passed."""
    fast, plain = (
        port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG), "float64", fast=fast)
        for fast in (True, False)
    )
    trainer = port.package.Trainer(plain, SETTINGS)
    loss = trainer.train_step(*BATCH).loss
    found = port.package.beam_search(plain, SOURCE, max_length=4)
    assert asked == []
    assert_close(np.array(port.package.Trainer(fast, SETTINGS).train_step(*BATCH).loss), np.array(loss))
    expected = port.package.beam_search(fast, SOURCE, max_length=4)
    assert asked == [None, False, True]
    np.testing.assert_array_equal(found.nbest_ids, expected.nbest_ids)
    port.package.Trainer(plain, SETTINGS, compile=True).train_step(*BATCH)
    assert asked[3:] == [True]


def test_quick_compilation_ends_with_its_context(port):
    runtime = port.package.runtime
    with runtime.quick_compilation():
        assert runtime.compiles_quickly()
        with pytest.raises(KeyError), runtime.quick_compilation():
            raise KeyError
        assert runtime.compiles_quickly()
    assert not runtime.compiles_quickly()


def test_quick_compilation_changes_no_result(port, asked):
    """TensorFlow traces nothing within the context, and traced functions return the same results."""
    models = [build(port) for _ in range(2)]
    trainers = [port.package.Trainer(model, SETTINGS) for model in models]
    with port.package.runtime.quick_compilation():
        found = [
            getattr(port.package, name)(models[0], SOURCE, max_length=4) for name in ("greedy_search", "beam_search")
        ]
        trainers[0].train_step(*BATCH)
        quick = trainers[0].evaluate(*BATCH)
    assert asked == []
    expected = [
        getattr(port.package, name)(models[1], SOURCE, max_length=4) for name in ("greedy_search", "beam_search")
    ]
    trainers[1].train_step(*BATCH)
    usual = trainers[1].evaluate(*BATCH)
    assert asked == [False, True, True, None, None]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.nbest_ids, other.nbest_ids)
        assert_close(one.nbest_scores, other.nbest_scores)
    assert_close(np.array(quick[0]), np.array(usual[0]))


@pytest.mark.parametrize("dtype", tiers.first_alone(["float64", "float32"], "dtypes"))
def test_gelu_is_accurate_for_large_negative_inputs(port, dtype):
    """``1 + erf`` rounds to 0 at -6 in float32 and at -9 in float64."""
    x = np.linspace(-9.0, 9.0, 73).astype(dtype)
    expected = [0.5 * value * math.erfc(-value / math.sqrt(2.0)) for value in x.astype(float).tolist()]
    found = port.to_numpy(port.package.layers.gelu(port.from_numpy(x)))
    np.testing.assert_allclose(found, expected, rtol=60 * np.finfo(dtype).eps)
