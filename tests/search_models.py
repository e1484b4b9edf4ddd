"""Helpers for the search tests: models that generate varied sentences with EOS tokens, and compilation options."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import numpy as np
import pytest
from conftest import random_weights, tiny_config

import reference_numpy
from transformer_parity.transformer.selftest.uncompiled import interpreted

TOLERANCE = 1e-12  # for float64
SEARCHES = ("greedy_search", "beam_search")
REPEATED = pytest.mark.extended("searches", "jax", "tf")
EITHER = [pytest.param("greedy_search", marks=REPEATED), "beam_search"]
COMPILED = (  # tests with many steps, which use the default compilation
    "test_cached_steps_match_uncached_steps",
    "test_beam_search_matches_the_textbook_algorithm",
    "test_search_result_does_not_depend_on_the_batch",
    "test_maximum_length_follows_each_source_sentence",
    "test_callback_receives_the_tokens_of_each_step",
    "test_top_values_and_indices_match_the_reference",
)


@pytest.fixture(autouse=True)
def _quick(request):
    """Use the default compilation only in a few tests, because it dominates their run time."""
    fixture = next((name for name in ("backend", "port") if name in request.fixturenames), None)
    backend = request.getfixturevalue(fixture).name if fixture else "numpy"
    with optimized_search(backend) if request.node.originalname in COMPILED else quick_search(backend):
        yield


def quick_search(backend):
    """Search without compiler optimizations, which are slow. TensorFlow doesn't compile at all."""
    return compiled_search(quick=True) if backend == "jax" else interpreted(backend)


def optimized_search(backend):
    """Search with the default compilation, regardless of the XLA_FLAGS that JAX uses."""
    return compiled_search(quick=False) if backend == "jax" else nullcontext()


@contextmanager
def compiled_search(quick):
    """Let JAX compile its search quickly or with full optimization."""
    from transformer_jax import compilation, runtime

    with runtime.quick_compilation():
        options = runtime.compiler_options()
    if quick:  # round bfloat16 values after every operation, like uncompiled code
        options["xla_allow_excess_precision"] = False
    else:  # XLA's defaults; some releases lack the second option
        defaults = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
        options = {name: value for name, value in defaults.items() if name in options}
    with patch.object(compilation, "compiler_options", lambda: options):
        yield


def lively(preset="annotated", seed=13, size=13, **overrides):
    """Return the config and weights of a model whose sentences vary and reach EOS at different times."""
    fields = {"tie_embeddings": "none", "output_bias": True, "source_vocab_size": size, "target_vocab_size": size}
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
    config = tiny_config(preset, **{**fields, **ids, **overrides})
    weights = random_weights(config, seed)
    if "output_proj.bias" in weights:
        weights["output_proj.bias"][config.eos_id] += 0.8
    return config, weights


def sources(config, seed=3, lengths=(6, 4, 1, 5, 2)):
    """Return padded source sentences of different lengths."""
    rng = np.random.default_rng(seed)
    ids = np.full((len(lengths), max(lengths)), config.pad_id)
    usual = [token for token in range(config.source_vocab_size) if token != config.pad_id]
    for row, length in enumerate(lengths):
        ids[row, :length] = rng.choice(usual, length)
    return ids


def load(backend, config, weights, dtype="float64"):
    return backend.package.Transformer.from_weights(config, weights, dtype)


def tokens_of(ids, config):
    """Return a hypothesis without padding."""
    return tuple(int(token) for token in ids if token != config.pad_id)


def assert_same(found, expected, tolerance=TOLERANCE):
    np.testing.assert_array_equal(found.nbest_ids, expected.nbest_ids)
    np.testing.assert_allclose(found.nbest_scores, expected.nbest_scores, rtol=tolerance, atol=0)


def load_reference(config, weights, dtype="float64"):
    return reference_numpy.Transformer.from_weights(config, weights, dtype)
