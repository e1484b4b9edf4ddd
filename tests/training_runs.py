"""Helpers for the training tests: a tiny model, batches with padding everywhere, and a trainer of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from conftest import random_weights, tiny_config

import reference_numpy as ref

NO_DROPOUT = ref.DropoutRates(embedding=0.0, residual=0.0)
RATES = ref.DropoutRates(embedding=0.2, attention=0.3, residual=0.0)  # a step with few dropout sites compiles faster
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1, "output_bias": True}
CONFIG = tiny_config(**ONE_LAYER, dropout=NO_DROPOUT)
WEIGHTS = random_weights(CONFIG, dtype="float64")
PAD = CONFIG.pad_id
SCHEDULE = {"warmup_steps": 40, "learning_rate_factor": 0.5}
TRAINERS = {  # dtype, dropout, and settings; each kind is compiled
    "plain": ("float64", NO_DROPOUT, {}),
    "four micro-batches, clipped": (
        "float64",
        NO_DROPOUT,
        {"accumulation_steps": 4, "clip_norm": 3.2, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3},
    ),
    "dropout": ("float32", RATES, {"accumulation_steps": 2, "clip_norm": 3.2}),
    "mixed": ("float32", NO_DROPOUT, {"mixed_bfloat16": True}),
    "everything kept": ("float64", RATES, {"accumulation_steps": 2, "clip_norm": 3.2}),
    "checkpointed": ("float64", RATES, {"accumulation_steps": 2, "clip_norm": 3.2, "activation_checkpointing": True}),
}


def make_batch(seed=0, sentences=8):
    """Return IDs with padding in sources, targets, and labels, an all-padding source, and uneven numbers of labels.

    If the batch is divided into four micro-batches, the last one has no labels.
    """
    rng = np.random.default_rng(seed)
    source, target, labels = (rng.integers(3, 37, (sentences, length)) for length in (4, 5, 5))
    target[:, 0] = CONFIG.bos_id
    source[1, 2:] = source[2] = target[1, 3:] = labels[1, 3:] = labels[4, 1:] = PAD
    target[6:, 1:] = labels[6:] = PAD
    return source, target, labels


def without_labels(batch):
    source, target, labels = batch
    return source, target, np.full_like(labels, PAD)


BATCH = make_batch()
BATCHES = [make_batch(0), make_batch(1), without_labels(make_batch(2)), make_batch(3)]


def build(backend, kind="plain", seed=0):
    """Return a trainer of a kind in ``TRAINERS`` whose model has different weights from ``WEIGHTS``."""
    dtype, rates, settings = TRAINERS[kind]
    config = CONFIG.replace(dropout=rates)
    model = backend.package.Transformer.from_weights(config, random_weights(config, seed=1), dtype=dtype)
    return backend.package.Trainer(model, ref.TrainingConfig(**SCHEDULE, **settings), seed)


@cache
def built(backend, kind):
    return build(backend, kind)


def at_the_start(backend, kind="plain", weights=WEIGHTS):
    """Return a trainer in its initial state. Each trainer is built only once, because compilation is slow."""
    trainer = built(backend, kind)
    backend.package.set_weights(trainer.model, weights)
    trainer.load_state(zero_state())
    return trainer


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation(backends) -> Iterator[None]:
    """Disable most XLA optimizations, which halves the run time. ``parity check`` tests the optimized code."""
    if "jax" not in [backend.name for backend in backends]:
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def zero_state(step=0, seed=0):
    zeros = {name: np.zeros_like(array) for name, array in WEIGHTS.items()}
    return ref.TrainingState(step, seed, zeros, {name: array.copy() for name, array in zeros.items()})


def everything(trainer):
    """Return everything that the next step depends on, by name."""
    state = trainer.export_state()
    return {
        "step": np.asarray(state.step),
        "seed": np.asarray(state.seed),
        **{f"weight {name}": array for name, array in trainer.model.export_weights().items()},
        **{f"first {name}": array for name, array in state.first_moment.items()},
        **{f"second {name}": array for name, array in state.second_moment.items()},
    }


def take_steps(trainer, batches):
    return [trainer.train_step(*batch) for batch in batches]


def losses_of(trainer, batches):
    return np.array([float(result.loss) for result in take_steps(trainer, batches)])


def assert_near(got, expected, tolerance, what=""):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, what
    error = np.linalg.norm(got - expected)
    assert error <= tolerance * np.linalg.norm(expected), (what, error)


def mode_of(backend, model):
    """Return the state that distinguishes training from inference in a framework, and its random state."""
    if backend.name == "torch":
        import torch

        return [module.training for module in model.modules()], torch.get_rng_state().tolist()
    if backend.name == "jax":
        from flax import nnx

        graph, _, rest = nnx.split(model, nnx.Param, ...)
        return graph, str(rest)
    if backend.name == "tf":
        return [variable.numpy().tolist() for variable in model.non_trainable_variables]
    return None


HANDOVER = [make_batch(seed) for seed in range(8)]
SOURCE, TARGET, RIGHT = BATCH


def model_of(backend, dtype):
    return backend.package.Transformer.from_weights(CONFIG, WEIGHTS, dtype=dtype)


NAME = "encoder.layers.0.feed_forward.inner_proj.bias"
