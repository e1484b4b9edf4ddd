"""Each port behaves like an ordinary model of its framework, so that users can treat it like any other model."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tiers
from conftest import PACKAGES, random_weights
from native_models import NO_DROPOUT, SOURCE, TARGET, assert_close, build

from reference_numpy import Recorder, parameter_shapes
from reference_numpy.functional import layer_norm
from transformer_parity.engine.system.machine import LIBRARIES

# --- Dropout rates: a rate close to one at a single site removes every value that passes through it ---


def train(backend, model, call):
    """Return the result of a call in training mode, which each framework enables differently."""
    options = {}
    if backend.name == "numpy":
        options["rng"] = np.random.default_rng(0)
    elif backend.name == "tf":
        options["training"] = True
    else:
        model.train()
    result = call(**options)
    if backend.name in ("torch", "jax"):
        model.eval()
    return backend.to_numpy(result)


@pytest.mark.parametrize("site", tiers.first_alone(NO_DROPOUT, "sites", "jax", "tf"))
def test_dropout_is_applied_at_every_site_in_training_mode(backend, site):
    model = build(backend, dropout={**NO_DROPOUT, site: 1 - 1e-9})
    expected = backend.to_numpy(build(backend, dropout=NO_DROPOUT)(SOURCE, TARGET))
    np.testing.assert_array_equal(backend.to_numpy(model(SOURCE, TARGET)), expected)  # dropout is off during inference
    seen = Recorder()
    logits = train(backend, model, lambda **options: model(SOURCE, TARGET, tap=seen, **options))
    taps = {name: backend.to_numpy(value) for name, value in seen.items()}
    weights = model.export_weights()
    for side, stack in (("source", "encoder.layers.0"), ("target", "decoder.layers.0")):
        attention, feed_forward = f"{stack}.self_attention", f"{stack}.feed_forward"
        if site == "embedding":  # the projection input is zero, so only the bias remains
            queries = taps[f"{attention}.query"].swapaxes(1, 2).reshape(2, -1, 24)
            assert (queries == weights[f"{attention}.query_proj.bias"]).all()
        elif site == "attention":  # dropout follows the tap of the weights
            assert taps[f"{attention}.weights"].any()
            assert not taps[f"{attention}.context"].any()
        elif site == "residual":  # only the residual branch reaches the norm
            scale, bias = weights[f"{attention}_norm.scale"], weights[f"{attention}_norm.bias"]
            expected = layer_norm(taps[f"{side}_embedding.output"], scale, bias, epsilon=1e-6)
            assert_close(taps[f"{attention}_norm.output"], expected)
        else:  # dropout follows the activation function
            assert taps[f"{feed_forward}.inner"].any()
            assert (taps[f"{feed_forward}.output"] == weights[f"{feed_forward}.output_proj.bias"]).all()
    assert_close(train(backend, model, lambda **options: model(SOURCE, TARGET, **options)), logits)  # fused path
    in_two_steps = lambda **options: model.decode(TARGET, model.encode(SOURCE, **options), SOURCE, **options)  # noqa: E731
    assert_close(train(backend, model, in_two_steps), logits)


def test_dropout_masks_change_in_training_and_dropout_is_off_in_inference(backend):
    model = build(backend, dropout={**NO_DROPOUT, "embedding": 0.5})
    rng = np.random.default_rng(0)
    draw = lambda **options: model(SOURCE, TARGET, **({"rng": rng} if "rng" in options else options))  # noqa: E731
    assert np.abs(train(backend, model, draw) - train(backend, model, draw)).max() > 1e-3
    np.testing.assert_array_equal(*(backend.to_numpy(model(SOURCE, TARGET)) for _ in range(2)))


def test_training_mode_without_dropout_matches_inference(backend):
    model = build(backend, dropout=NO_DROPOUT)
    expected = backend.to_numpy(model(SOURCE, TARGET))
    assert_close(train(backend, model, lambda **options: model(SOURCE, TARGET, **options)), expected)


def test_every_parameter_has_a_gradient(port):
    model = build(port, tie_embeddings="none", output_bias=True)
    assert len(gradients := port.gradients(model, SOURCE, TARGET)) == len(parameter_shapes(model.config))
    # A key bias shifts all scores in a row equally, which softmax ignores. The model has three key biases.
    assert sum(np.abs(gradient).max() < 1e-9 for gradient in gradients) == 3


def test_search_calls_the_encode_method_of_a_subclass(backend):
    class Silent(backend.package.Transformer):
        """A model that encodes every source as zeros."""

        def encode(self, *args, **options):
            return super().encode(*args, **options) * 0.0

    model = build(backend)
    silent = Silent.from_weights(model.config, random_weights(model.config), "float64")
    start = np.full((len(SOURCE), 1), model.config.bos_id)
    logits = backend.to_numpy(model.decode(start, model.encode(SOURCE) * 0.0, SOURCE))[:, 0]
    best = np.delete(logits, model.config.pad_id, 1).max(1)  # padding is never generated
    found = backend.package.greedy_search(silent, SOURCE, 1)
    np.testing.assert_allclose(found.scores, best - np.log(np.exp(logits).sum(1)), rtol=1e-12)


@pytest.mark.parametrize("arguments", [(10, 7), (10, 8, "sines"), (10, 8, "split", "n"), (10, 2, "split", "m_minus_1")])
def test_invalid_sinusoid_arguments_raise_value_error(backend, arguments):
    with pytest.raises(ValueError, match=r"even d_model|must be one of|at least 4"):
        backend.package.sinusoidal_encoding(*arguments)


# --- Each package without the others ---

# Runs in a separate process in which the other frameworks can't be imported and every warning is an error.
ALONE = """
import importlib, sys, warnings
from importlib.machinery import PathFinder
import numpy as np
warnings.simplefilter("error")
package, missing = sys.argv[1], sys.argv[2].split(",")
importers = set()

class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in missing:
            return super().find_spec(name, path, target)
        frame = sys._getframe(1)
        while frame.f_globals["__name__"].startswith("importlib"):
            frame = frame.f_back
        importers.add(frame.f_globals["__name__"].partition(".")[0])

sys.meta_path[sys.meta_path.index(PathFinder)] = Hidden
from reference_numpy import TransformerConfig, init_weights
port = importlib.import_module(package)
config = TransformerConfig(source_vocab_size=11, target_vocab_size=11, d_model=8, num_heads=2, d_ff=6)
model = port.Transformer.from_weights(config, init_weights(config))
logits = model(np.array([[3, 4, 5]]), np.array([[1, 6]]))
print(tuple(logits.shape), "float32" in str(logits.dtype), sorted(importers & {package, "reference_numpy"}))
"""
NEEDED_BY = {"jax": {"rich"}, "tf": {"rich"}}  # libraries that the framework itself imports
FRAMEWORKS = {"numpy": [], "torch": ["torch"], "jax": ["jax", "flax", "optax"], "tf": ["tensorflow", "keras"]}


@pytest.mark.extended("backends", "jax", "tf")
def test_package_needs_no_other_framework(backend):
    """Each package works without the other frameworks and the command-line libraries, and never imports them.

    JAX runs with its default settings, without float64.
    """
    others = [name for key, names in FRAMEWORKS.items() if key != backend.name for name in names]
    ports = [package for key, package in PACKAGES.items() if key not in ("numpy", backend.name)]
    libraries = set(LIBRARIES) - NEEDED_BY.get(backend.name, set())
    missing = ",".join([*others, *ports, *sorted(libraries), "transformer_parity"])
    command = [sys.executable, "-c", ALONE, PACKAGES[backend.name], missing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    # TensorFlow tries to import JAX, and torch's compiler tries to import TensorFlow, but our packages import neither.
    assert done.stdout.strip() == "(1, 2, 11) True []"
