"""Helpers for the tests of framework idioms: a tiny model, a batch, and a process that loads only one framework."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from conftest import random_weights, tiny_config

from reference_numpy import TrainingConfig

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])
LABELS = np.array([[3, 4, 2], [5, 2, 0]])
BATCH = SOURCE, TARGET, LABELS
SETTINGS = TrainingConfig(warmup_steps=4, learning_rate_factor=0.5)
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1, "attention_bias": True}
NO_DROPOUT = {"embedding": 0.0, "attention": 0.0, "residual": 0.0, "feed_forward": 0.0}


def build(backend, dtype="float64", *, fast=True, **overrides):
    config = tiny_config(**{**ONE_LAYER, **overrides})
    options = {"rngs": 0} if backend.name == "jax" else {}
    return backend.package.Transformer.from_weights(config, random_weights(config), dtype=dtype, fast=fast, **options)


def assert_close(got, expected):
    assert got.shape == expected.shape
    assert np.linalg.norm(got - expected) <= 1e-12 * np.linalg.norm(expected)


def losses(trainer, steps=3):
    return [float(trainer.train_step(*BATCH).loss) for _ in range(steps)]


def run_alone(program, **environment):
    """Run a program in a separate process that can import modules from this directory, and return its output."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
