"""In its framework each port is a native citizen: what its users do with any model works with this one."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import tiers
from conftest import PACKAGES, assert_same_bits, random_weights, tiny_config

from reference_numpy import Recorder, TrainingConfig, parameter_shapes, tap_shapes
from reference_numpy.functional import layer_norm
from transformer_parity.engine.system.machine import LIBRARIES

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])
LABELS = np.array([[3, 4, 2], [5, 2, 0]])
BATCH = SOURCE, TARGET, LABELS
SETTINGS = TrainingConfig(warmup_steps=4, learning_rate_factor=0.5)
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1, "attention_bias": True}
NO_DROPOUT = {"embedding": 0.0, "attention": 0.0, "residual": 0.0, "feed_forward": 0.0}


def build(backend, dtype="float64", **overrides):
    config = tiny_config(**{**ONE_LAYER, **overrides})
    return backend.package.Transformer.from_weights(config, random_weights(config), dtype=dtype)


def assert_close(got, expected):
    assert got.shape == expected.shape
    assert np.linalg.norm(got - expected) <= 1e-12 * np.linalg.norm(expected)


def losses(trainer, steps=3):
    return [float(trainer.train_step(*BATCH).loss) for _ in range(steps)]


def run_alone(program, **environment):
    """Run a program in a process of its own, where it may import from here; return what it prints."""
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


# --- Dropout, by argument: a rate of almost one at a single site silences whatever passes through it ---


def train(backend, model, call):
    """Return the result of a call in training mode, as each framework asks for it; call passes the options on."""
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
def test_dropout(backend, site):
    model = build(backend, dropout={**NO_DROPOUT, site: 1 - 1e-9})
    expected = backend.to_numpy(build(backend, dropout=NO_DROPOUT)(SOURCE, TARGET))
    np.testing.assert_array_equal(backend.to_numpy(model(SOURCE, TARGET)), expected)  # inference drops nothing
    seen = Recorder()
    logits = train(backend, model, lambda **options: model(SOURCE, TARGET, tap=seen, **options))
    taps = {name: backend.to_numpy(value) for name, value in seen.items()}
    weights = model.export_weights()
    for side, stack in (("source", "encoder.layers.0"), ("target", "decoder.layers.0")):
        attention, feed_forward = f"{stack}.self_attention", f"{stack}.feed_forward"
        if site == "embedding":  # nothing is left to project: only the bias is
            queries = taps[f"{attention}.query"].swapaxes(1, 2).reshape(2, -1, 24)
            assert (queries == weights[f"{attention}.query_proj.bias"]).all()
        elif site == "attention":  # behind the tap of the weights
            assert taps[f"{attention}.weights"].any()
            assert not taps[f"{attention}.context"].any()
        elif site == "residual":  # only what went past the sub-layer reaches the norm
            scale, bias = weights[f"{attention}_norm.scale"], weights[f"{attention}_norm.bias"]
            expected = layer_norm(taps[f"{side}_embedding.output"], scale, bias, epsilon=1e-6)
            assert_close(taps[f"{attention}_norm.output"], expected)
        else:  # behind the activation
            assert taps[f"{feed_forward}.inner"].any()
            assert (taps[f"{feed_forward}.output"] == weights[f"{feed_forward}.output_proj.bias"]).all()
    assert_close(train(backend, model, lambda **options: model(SOURCE, TARGET, **options)), logits)  # the fused path
    in_two_steps = lambda **options: model.decode(TARGET, model.encode(SOURCE, **options), SOURCE, **options)  # noqa: E731
    assert_close(train(backend, model, in_two_steps), logits)


def test_training_draws_anew_and_inference_never_draws(backend):
    model = build(backend, dropout={**NO_DROPOUT, "embedding": 0.5})
    rng = np.random.default_rng(0)
    draw = lambda **options: model(SOURCE, TARGET, **({"rng": rng} if "rng" in options else options))  # noqa: E731
    assert np.abs(train(backend, model, draw) - train(backend, model, draw)).max() > 1e-3
    np.testing.assert_array_equal(*(backend.to_numpy(model(SOURCE, TARGET)) for _ in range(2)))


def test_training_without_dropout_is_inference(backend):
    model = build(backend, dropout=NO_DROPOUT)
    expected = backend.to_numpy(model(SOURCE, TARGET))
    assert_close(train(backend, model, lambda **options: model(SOURCE, TARGET, **options)), expected)


def test_every_parameter_has_a_gradient(port):
    model = build(port, tie_embeddings="none", output_bias=True)
    assert len(gradients := port.gradients(model, SOURCE, TARGET)) == len(parameter_shapes(model.config))
    # A key bias moves all scores of a row alike, which softmax does not see; there are three of them.
    assert sum(np.abs(gradient).max() < 1e-9 for gradient in gradients) == 3


# --- PyTorch ---


@pytest.mark.only("torch")
def test_torch_state_dict(port, tmp_path):
    import torch

    model = build(port, tie_embeddings="target_output", output_bias=True, position_encoding="learned")
    fresh = port.package.Transformer(model.config, dtype="float64").eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    assert_same_bits(fresh.export_weights(), model.export_weights())
    torch.testing.assert_close(fresh(SOURCE, TARGET), model(SOURCE, TARGET), rtol=0, atol=0)


@pytest.mark.only("torch")
def test_torch_to(port):
    import torch

    config = tiny_config(**ONE_LAYER)
    weights = random_weights(config)
    model = port.package.Transformer.from_weights(config, weights).to(torch.float64)
    expected = port.package.Transformer.from_weights(config, weights, dtype="float64")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert_same_bits(model.export_weights(), expected.export_weights())
    torch.testing.assert_close(model(SOURCE, TARGET), expected(SOURCE, TARGET), rtol=0, atol=0)
    assert model.to(torch.bfloat16)(SOURCE, TARGET).dtype == torch.bfloat16


@pytest.mark.only("torch")
def test_torch_compiles_without_a_break(port):
    import torch

    model = build(port)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for source, target in ((SOURCE, TARGET), (SOURCE[:, :3], TARGET[:, :2])):
        ids = torch.tensor(source), torch.tensor(target)
        assert_close(port.to_numpy(compiled(*ids)), port.to_numpy(model(*ids)))
    model.train()
    assert torch.isfinite(compiled(*ids)).all()
    torch.compiler.reset()


@pytest.mark.only("torch")
def test_torch_deepcopy(port):
    model = build(port)
    twin = copy.deepcopy(model)
    assert twin.source_embedding is twin.target_embedding
    assert_same_bits(twin.export_weights(), model.export_weights())
    port.package.set_weights(twin, random_weights(twin.config, seed=1))
    kept = {name: array.astype("float64") for name, array in random_weights(model.config).items()}
    assert_same_bits(model.export_weights(), kept)


# --- JAX ---


@pytest.mark.only("jax")
def test_jax_jit(port):
    """One trace for one shape, training or not; the same numbers as without."""
    from flax import nnx

    model = build(port, dropout={**NO_DROPOUT, "residual": 0.5})
    traces = []

    @nnx.jit
    def call(model, source_ids, target_ids):
        traces.append(source_ids.shape)
        return model(source_ids, target_ids)

    for _ in range(2):
        assert_close(port.to_numpy(call(model, SOURCE, TARGET)), port.to_numpy(model(SOURCE, TARGET)))
    model.train()
    first, second = (port.to_numpy(call(model, SOURCE, TARGET)) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3  # the jitted call moved the model's random state on
    assert traces == [(2, 4), (2, 4)]


@pytest.mark.only("jax")
def test_jax_dropouts_draw_apart(port):
    """Layers that drop the same places would be one layer, as far as regularisation goes."""
    import jax
    from flax import nnx

    dropouts = [module for _, module in nnx.iter_modules(build(port)) if isinstance(module, nnx.Dropout)]
    keys = {tuple(jax.random.key_data(module.rngs.key.get_value()).tolist()) for module in dropouts}
    assert len(keys) == len(dropouts) > 5


@pytest.mark.only("jax")
def test_jax_split_and_merge(port):
    import jax
    from flax import nnx

    model = build(port, tie_embeddings="all")
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    assert len(jax.tree.leaves(parameters)) == len(parameter_shapes(model.config))
    merged = nnx.merge(graph, parameters, rest)
    assert merged.source_embedding is merged.target_embedding
    assert_same_bits(merged.export_weights(), model.export_weights())
    doubled = nnx.merge(graph, jax.tree.map(lambda x: 2 * x, parameters), rest)
    expected = {name: 2 * array for name, array in model.export_weights().items()}
    assert_same_bits(doubled.export_weights(), expected)


@pytest.mark.only("jax")
def test_jax_taps_under_jit(port):
    """A recorder made inside the traced function hands out its values with the result."""
    from flax import nnx

    model = build(port)

    @nnx.jit
    def call(model, source_ids, target_ids):
        seen = Recorder()
        return model(source_ids, target_ids, tap=seen), dict(seen)

    logits, taps = call(model, SOURCE, TARGET)
    expected = Recorder()
    model(SOURCE, TARGET, tap=expected)
    assert {name: value.shape for name, value in taps.items()} == tap_shapes(model.config, 2, 4, 3)
    for name, value in taps.items():
        assert_close(port.to_numpy(value), port.to_numpy(expected[name]))
    assert_close(port.to_numpy(logits), port.to_numpy(expected["logits"]))


@pytest.mark.only("torch")
def test_torch_search_leaves_modes_alone(port):
    """A model in training with a frozen part searches without dropout, and is what it was."""
    model = build(port)
    model.train()
    model.encoder.eval()
    expected = port.package.greedy_search(build(port), SOURCE, max_length=3)
    found = port.package.greedy_search(model, SOURCE, max_length=3)
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert model.training
    assert model.decoder.training
    assert not model.encoder.training
    assert not model.encoder.layers[0].training


@pytest.mark.only("jax")
def test_jax_decodes_under_jit(port):
    """A cache passes through a compiled step, which is compiled once; or through the body of a loop."""
    import jax
    from flax import nnx

    model, traces = build(port), []
    expected = port.to_numpy(model(SOURCE, TARGET))

    @nnx.jit
    def step(model, target_ids, cache):
        traces.append(target_ids.shape)
        return model.decode_step(target_ids, cache)

    cache = model.init_cache(SOURCE, 3)
    for position in range(3):
        logits, cache = step(model, TARGET[:, position], cache)
        assert_close(port.to_numpy(logits), expected[:, position])
    assert traces == [(2,)]
    with pytest.raises(ValueError, match="all 3 are taken"):
        model.decode_step(TARGET[:, 0], cache)

    def step_of_loop(cache, target_ids):
        logits, cache = model.decode_step(target_ids, cache)
        return cache, logits

    _, logits = jax.lax.scan(step_of_loop, model.init_cache(SOURCE, 3), TARGET.T)
    assert_close(port.to_numpy(logits), expected.swapaxes(0, 1))


@pytest.mark.only("jax")
def test_jax_reorders_a_cache(port):
    rng, rows = np.random.default_rng(0), np.array([2, 2, 0, 3])
    before = [rng.normal(size=(4, 2, 7, width)) for width in (3, 5)]
    cache = port.package.KeyValueCache(*map(port.from_numpy, before), 6)
    cache.reorder(port.from_numpy(rows))
    for array, kept in zip((cache.key, cache.value), before, strict=True):
        np.testing.assert_array_equal(port.to_numpy(array), kept[rows])


@pytest.mark.only("jax")
@pytest.mark.parametrize("search", tiers.first_alone(["beam_search", "greedy_search"], "searches"))
def test_jax_compiles_a_search_once(port, search, caplog):
    """Other lengths, limits and weights, one sentence more, and a look at each step, meet what is compiled already."""
    import jax

    model, find = build(port), getattr(port.package, search)
    three = np.concatenate([SOURCE, SOURCE[:1]])
    four_and_longer = np.pad(three, ((0, 1), (0, 2)), constant_values=7)
    find(model, three, max_length=9)
    with caplog.at_level(logging.DEBUG, "jax"), jax.log_compiles():
        find(model, four_and_longer, max_length=9)
        find(model, three, max_length=12, min_length=4, start_id=5)
        find(model, three, max_length=9, on_step=lambda ids: None)
        port.package.set_weights(model, random_weights(model.config, seed=1))
        find(model, three, max_length=9)
        if search == "beam_search":
            find(model, three, max_length=9, length_penalty=1.0, length_penalty_kind="power")
        assert "Compiling" not in caplog.text
        find(model, three, max_length=33)
        assert "Compiling" in caplog.text  # a compilation is seen


# --- TensorFlow ---


@pytest.mark.only("tf")
def test_tf_function_traces_once(port):
    import tensorflow as tf

    model = build(port)
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)] * 2)
    def call(source_ids, target_ids):
        traces.append(1)
        return model(source_ids, target_ids)

    for source, target in ((SOURCE, TARGET), (SOURCE[:1], TARGET[:1, :2]), (SOURCE[:, :3], SOURCE)):
        expected = port.to_numpy(model(source, target))
        assert_close(port.to_numpy(call(source.astype(np.int32), target.astype(np.int32))), expected)
    assert traces == [1]


@pytest.mark.only("tf")
def test_tf_xla(port):
    import tensorflow as tf

    model = build(port, position_encoding="learned")
    compiled = tf.function(lambda *ids: model(*ids), jit_compile=True)
    assert_close(
        port.to_numpy(compiled(tf.constant(SOURCE), tf.constant(TARGET))), port.to_numpy(model(SOURCE, TARGET))
    )


@pytest.mark.only("tf")
def test_tf_decodes_in_a_function(port):
    """A cache passes through a traced step, which is traced once; or through the body of a compiled loop."""
    import tensorflow as tf

    model, traces = build(port), []
    expected = port.to_numpy(model(SOURCE, TARGET))

    @tf.function
    def step(target_ids, cache):
        traces.append(target_ids.shape)
        return model.decode_step(target_ids, cache)

    cache = model.init_cache(SOURCE, 3)
    for position in range(3):
        logits, cache = step(tf.constant(TARGET[:, position]), cache)
        assert_close(port.to_numpy(logits), expected[:, position])
    assert traces == [(2,)]
    with pytest.raises(ValueError, match="all 3 are taken"):
        model.decode_step(TARGET[:, 0], cache)

    @tf.function(jit_compile=True)
    def loop(source_ids, target_ids):
        def step_of_loop(cache, logits):
            new, cache = model.decode_step(target_ids[:, cache.length], cache)
            return cache, tf.tensor_scatter_nd_update(logits, [[cache.length - 1]], new[None])

        start = model.init_cache(source_ids, 3), tf.zeros([3, 2, 37], tf.float64)
        return tf.while_loop(lambda cache, logits: cache.length < 3, step_of_loop, start)[1]

    logits = loop(tf.constant(SOURCE), tf.constant(TARGET))
    assert_close(port.to_numpy(logits), expected.swapaxes(0, 1))


@pytest.mark.only("tf")
@pytest.mark.parametrize("search", tiers.first_alone(["beam_search", "greedy_search"], "searches"))
def test_tf_traces_a_search_once(port, search, monkeypatch):
    """Other lengths, limits and weights, one sentence more, and a look at each step, meet what is compiled already."""
    import tensorflow as tf

    model, find, encoded, traces, sizes = build(port), getattr(port.package, search), [], [], set()
    three = np.concatenate([SOURCE, SOURCE[:1]])
    four_and_longer = np.pad(three, ((0, 1), (0, 2)), constant_values=7)
    encode, decode_step, call = type(model)._encode, model.decode_step, port.package.compilation._call

    def traced_decode_step(model, *args):
        traces.append(args)
        return decode_step(*args)

    def traced_encode(model, *args, **options):
        encoded.append(args)
        return encode(model, *args, **options)

    def sized_call(function, model, args, *options):
        sizes.add((function, *(tuple(np.shape(x)) for x in tf.nest.flatten(args))))
        return call(function, model, args, *options)

    monkeypatch.setattr(type(model), "decode_step", traced_decode_step)
    monkeypatch.setattr(type(model), "_encode", traced_encode)
    monkeypatch.setattr(port.package.compilation, "_call", sized_call)
    first = find(model, three, max_length=9)
    assert (len(encoded), len(traces), len(sizes)) == (1, 1, 2)  # the encoder, and the loop
    find(model, four_and_longer, max_length=9)
    find(model, three, max_length=12, min_length=4, start_id=5)
    find(model, three, max_length=9, on_step=lambda ids: None)
    port.package.set_weights(model, random_weights(model.config, seed=1))
    other = find(model, three, max_length=9)
    assert (other.scores != first.scores).all()
    if search == "beam_search":
        find(model, three, max_length=9, length_penalty=1.0, length_penalty_kind="power")
    assert (len(encoded), len(traces), len(sizes)) == (1, 1, 2)
    find(model, three, max_length=33)  # the loop is compiled anew, but not traced
    if search == "beam_search":
        find(model, three, max_length=9, beam_size=2)
    assert (len(encoded), len(traces), len(sizes)) == (1, 1, 3 if search == "greedy_search" else 4)


@pytest.mark.only("tf")
def test_tf_lets_go_of_a_model(port):
    """What was traced for a model does not keep it alive, and does not go where the model goes."""
    model = build(port)
    port.package.greedy_search(model, SOURCE, max_length=2)
    twin, alive = copy.deepcopy(model), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert port.package.greedy_search(twin, SOURCE, max_length=2).ids.shape == (2, 2)


@pytest.mark.only("tf")
@pytest.mark.parametrize("tie_embeddings", ["none", "all"])
def test_tf_save_and_load(port, tmp_path, tie_embeddings):
    import keras

    model = build(port, tie_embeddings=tie_embeddings, final_norm=True, output_bias=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert_same_bits(loaded.export_weights(), model.export_weights())
    np.testing.assert_array_equal(port.to_numpy(loaded(SOURCE, TARGET)), port.to_numpy(model(SOURCE, TARGET)))


# --- Each package alone ---

# Runs in a process of its own, in which the other frameworks do not exist, and every warning is an error.
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
NEEDED_BY = {"jax": {"rich"}, "tf": {"rich"}}  # libraries that a framework itself imports
FRAMEWORKS = {"numpy": [], "torch": ["torch"], "jax": ["jax", "flax", "optax"], "tf": ["tensorflow", "keras"]}


@pytest.mark.extended("backends", "jax", "tf")
def test_package_needs_no_other_framework(backend):
    """Nor a library of the command line: it works where they are missing, and never asks for them.

    JAX here is as it comes, without float64.
    """
    others = [name for key, names in FRAMEWORKS.items() if key != backend.name for name in names]
    ports = [package for key, package in PACKAGES.items() if key not in ("numpy", backend.name)]
    libraries = set(LIBRARIES) - NEEDED_BY.get(backend.name, set())
    missing = ",".join([*others, *ports, *sorted(libraries), "transformer_parity"])
    command = [sys.executable, "-c", ALONE, PACKAGES[backend.name], missing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    # TensorFlow asks for JAX, and torch's compiler for TensorFlow, if they happen to be there; nothing of ours does.
    assert done.stdout.strip() == "(1, 2, 11) True []"
