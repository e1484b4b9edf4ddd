"""Checkpoints of a small model for tests."""

from __future__ import annotations

import json

import pytest
from conftest import assert_same_bits, random_weights, tiny_config

from transformer_spec.checkpoint import Checkpoint, save_checkpoint
from transformer_spec.training_config import TrainingConfig, TrainingState

NAME = "decoder.layers.0.cross_attention.key_proj.kernel"
PROGRESS = {
    "epoch": 3,
    "order": [2, 0, 1],
    "best": {"loss": 0.1 + 0.2, "steps": []},
    "done": False,
    "by": None,
    "ümlaut \ud800": "日本 \0 ' \"",
    "zero": -0.0,
    "large": 2**200,
}


def small_config(**changes):
    return tiny_config(num_encoder_layers=1, num_decoder_layers=1, **changes)


def make(config=None, dtype="float32", moments=None, **changes):
    """Return a checkpoint in which no value is zero or a default."""
    config = config or small_config()
    moments = moments or dtype
    second = {name: array**2 for name, array in random_weights(config, 2, moments).items()}
    return Checkpoint(
        **{
            "config": config,
            "settings": TrainingConfig(warmup_steps=7, total_steps=100, cooldown_steps=20, clip_norm=0.5),
            "weights": random_weights(config, 0, dtype),
            "state": TrainingState(41, 12345, random_weights(config, 1, moments), second),
            "progress": PROGRESS,
            "vocabulary": bytes(range(256)),
            **changes,
        }
    )


def assert_same(got, expected):
    for field in ("config", "settings", "vocabulary"):
        assert getattr(got, field) == getattr(expected, field)
    assert (got.state.step, got.state.seed) == (expected.state.step, expected.state.seed)
    assert json.dumps(got.progress, sort_keys=True) == json.dumps(expected.progress, sort_keys=True)
    assert_same_bits(got.weights, expected.weights)
    assert_same_bits(got.state.first_moment, expected.state.first_moment)
    assert_same_bits(got.state.second_moment, expected.state.second_moment)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.safetensors"


@pytest.fixture
def saved(path):
    """Save a valid checkpoint at ``path`` and return its bytes."""
    save_checkpoint(path, make())
    return path.read_bytes()
