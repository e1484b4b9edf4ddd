"""Tiny reference models and padded batches for tests of the backward pass."""

from __future__ import annotations

import numpy as np
from conftest import random_weights, tiny_config

import reference_numpy as ref

RATES = ref.DropoutRates(embedding=0.2, attention=0.3, residual=0.25, feed_forward=0.35)
DEPTH = {"num_encoder_layers": 2, "num_decoder_layers": 2}


def tiny_model(preset="paper_base", dtype="float64", **overrides):
    config = tiny_config(preset, **{**DEPTH, **overrides})
    return ref.Transformer.from_weights(config, random_weights(config), dtype)


def tiny_batch(config, seed=0, labeled=True):
    """Return a batch with padding on both sides, an all-padding source, and rows with different numbers of labels."""
    rng = np.random.default_rng(seed)
    source, target, labels = (rng.integers(3, 37, shape) for shape in ((4, 7), (4, 5), (4, 5)))
    target[:, 0] = config.bos_id
    source[1, 4:] = source[2] = config.pad_id
    target[1, 3:] = labels[1, 3:] = labels[3, 1:] = config.pad_id
    return source, target, labels if labeled else np.full_like(labels, config.pad_id)


def everything(gradients):
    return {**gradients.parameters, **gradients.taps}
