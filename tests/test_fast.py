"""The fast code of every package agrees with its formulas in the forward pass, gradients, training, and search."""

from __future__ import annotations

import numpy as np
import pytest
import tiers
from conftest import random_weights, tiny_config

from reference_numpy import DropoutRates, TrainingConfig

# The first has tied embeddings, swish, and post-norm; the second has untied embeddings, ReLU, and pre-norm.
PRESETS = tiers.first_alone(["marian", "annotated", "paper_base", "torch"], "presets", "jax", "tf")
FLOAT32 = 64 * np.finfo(np.float32).eps
NO_DROPOUT = {"dropout": DropoutRates()}


@pytest.fixture(params=PRESETS)
def preset(request):
    return request.param


def both(backend, preset, dtype, **overrides):
    """Return a model that uses the formulas and a model that uses ``fast.py``."""
    config = tiny_config(preset, num_encoder_layers=2, num_decoder_layers=2, **{**NO_DROPOUT, **overrides})
    weights = random_weights(config)
    load = backend.package.Transformer.from_weights
    plain, fast = (load(config, weights, dtype, fast=fast) for fast in (False, True))
    assert (plain.fast, fast.fast) == (False, True)
    return plain, fast


def batch(config):
    """Return a batch with padding on both sides and an all-padding source."""
    rng = np.random.default_rng(0)
    source, target, labels = (rng.integers(3, 37, shape) for shape in ((4, 7), (4, 5), (4, 5)))
    target[:, 0] = config.bos_id
    source[1, 4:] = source[2] = config.pad_id
    target[1, 3:] = labels[1, 3:] = config.pad_id
    return source, target, labels


def assert_near(found, expected, dtype, what=""):
    """Fail unless the error is small relative to the largest value of the tensor."""
    found, expected = (np.asarray(array, np.float64) for array in (found, expected))
    error = np.abs(found - expected).max(initial=0.0)
    assert error <= (1e-12 if dtype == "float64" else FLOAT32) * max(1.0, np.abs(expected).max(initial=0.0)), what


@pytest.mark.parametrize("dtype", tiers.first_alone(["float64", "float32"], "dtypes", "jax", "tf"))
def test_fast_logits_agree_with_the_formulas(backend, preset, dtype):
    plain, fast = both(backend, preset, dtype)
    source, target, _ = batch(plain.config)
    found, expected = (backend.to_numpy(model(source, target)) for model in (fast, plain))
    assert_near(found, expected, dtype)


@pytest.mark.parametrize("dtype", tiers.first_alone(["float64", "float32"], "dtypes", "jax", "tf"))
def test_fast_gradients_agree_with_the_formulas(backend, preset, dtype):
    plain, fast = both(backend, preset, dtype)
    found, expected = (backend.package.gradients(model, *batch(plain.config)) for model in (fast, plain))
    assert_near(found.loss, expected.loss, dtype, "loss")
    for kind in ("parameters", "taps"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert list(ours) == list(theirs)
        for name in theirs:
            assert_near(ours[name], theirs[name], dtype, name)


@pytest.mark.parametrize("micro_batches", tiers.first_alone([2, 1], "steps", "jax", "tf"))
def test_fast_steps_agree_with_the_formulas(backend, preset, micro_batches):
    models = both(backend, preset, "float64")
    settings = TrainingConfig(warmup_steps=2, clip_norm=0.5, accumulation_steps=micro_batches, epsilon=1e-4)
    trainers = [backend.package.Trainer(model, settings) for model in models]
    for _ in range(3):
        expected, found = (trainer.train_step(*batch(models[0].config)) for trainer in trainers)
        assert int(found.tokens) == int(expected.tokens)
        assert_near(found.loss, expected.loss, "float64", "loss")
        assert_near(found.gradient_norm, expected.gradient_norm, "float64", "norm")
    expected, found = (
        {**model.export_weights(), **trainer.export_state().first_moment}
        for model, trainer in zip(models, trainers, strict=True)
    )
    for name in expected:
        assert_near(found[name], expected[name], "float64", name)


@pytest.mark.parametrize("beam_size", tiers.first_alone([3, None, 40], "searches", "jax", "tf"))
def test_fast_searches_agree_with_the_formulas(backend, preset, beam_size):
    plain, fast = both(backend, preset, "float64")
    source = batch(plain.config)[0]
    if beam_size is None:
        expected, found = (backend.package.greedy_search(model, source, 9) for model in (plain, fast))
    else:
        options = {"beam_size": beam_size, "num_hypotheses": 3, "max_length": 9}
        expected, found = (backend.package.beam_search(model, source, **options) for model in (plain, fast))
    np.testing.assert_array_equal(found.nbest_ids, expected.nbest_ids)
    np.testing.assert_allclose(found.nbest_scores, expected.nbest_scores, rtol=1e-12)
