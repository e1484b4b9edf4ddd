"""What users of JAX and Flax NNX do with any module works with this one."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config
from test_native import assert_close

import reference_numpy as ref

pytestmark = pytest.mark.only("jax")

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])
CONFIG = tiny_config(num_encoder_layers=1, num_decoder_layers=1)


def build(port, dtype="float32", **overrides):
    config = tiny_config(**{"num_encoder_layers": 1, "num_decoder_layers": 1, **overrides})
    return port.package.Transformer.from_weights(config, random_weights(config), dtype)


@pytest.mark.parametrize("tie", ["target_output", "all"])
def test_a_tied_table_is_one_parameter_in_two_places(port, tie):
    import jax
    from flax import nnx

    model = build(port, tie_embeddings=tie)
    for twin in (model, nnx.clone(model), nnx.merge(*nnx.split(model))):
        assert twin.output_proj.table is twin.target_embedding.table
        leaves = jax.tree.leaves(nnx.state(twin, nnx.Param))
        assert sum(leaf.size for leaf in leaves) == ref.count_parameters(model.config)
    gradients = nnx.grad(lambda model: model(SOURCE, TARGET).sum())(model)
    assert len(jax.tree.leaves(gradients)) == len(leaves)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "swish"])
def test_deepcopy_and_pickle_of_layers(port, activation):
    """Every module of the package can be copied: none holds a function that belongs to a process."""
    from flax import nnx

    model = build(port, activation=activation, dropout={"residual": 0.1, "feed_forward": 0.1, "attention": 0.1})
    x = np.ones((2, 4, 24), np.float32)
    for part in (model.encoder, model.source_embedding, model.output_proj):
        for twin in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            for (_, ours), (_, theirs) in zip(nnx.iter_modules(part), nnx.iter_modules(twin), strict=True):
                assert type(ours) is type(theirs)
                assert ours is not theirs
    np.testing.assert_array_equal(copy.deepcopy(model.encoder)(x), model.encoder(x))


def test_decode_step_leaves_its_argument_alone(port):
    model = build(port, "float64")
    empty = model.init_cache(SOURCE, 3)
    first, one = model.decode_step(TARGET[:, 0], empty)
    assert (int(empty.length), int(one.length)) == (0, 1)
    again, _ = model.decode_step(TARGET[:, 0], empty)
    np.testing.assert_array_equal(port.to_numpy(again), port.to_numpy(first))


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies(port, way):
    model = port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG), device="cpu", precision="highest")
    twin = way(model)
    assert twin.source_embedding is twin.target_embedding
    np.testing.assert_array_equal(port.to_numpy(twin(SOURCE, TARGET)), port.to_numpy(model(SOURCE, TARGET)))
    port.package.set_weights(twin, random_weights(CONFIG, seed=1))
    assert_same_bits(model.export_weights(), random_weights(CONFIG))


def test_precision_is_the_models_own(port):
    """It is in every product of the model, forward and backward, and nowhere else; None leaves that of the process."""
    import jax
    from flax import nnx

    def loss(model):
        step, _ = model.decode_step(TARGET[:, 0], model.init_cache(SOURCE, 1))
        return (model(SOURCE, TARGET) ** 2).sum() + step.sum()

    for precision, expected in ((None, ""), ("highest", "Precision.HIGHEST"), ("fast", "Precision.HIGH")):
        model = port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG), precision=precision)
        graph, state = nnx.split(model)
        gradient = jax.grad(lambda state, graph=graph: loss(nnx.merge(graph, state)), allow_int=True)
        text = str(jax.make_jaxpr(gradient)(state))
        products, found = text.count("dot_general["), re.findall(r"precision=\(?([\w.]+)", text)
        assert products > 50
        assert found == ([expected] * products if precision else []), set(found)
        assert jax.config.jax_default_matmul_precision is None


def test_shapes_without_computing(port):
    from flax import nnx

    model = build(port, "float64")
    assert nnx.eval_shape(lambda model: model(SOURCE, TARGET), model).shape == (2, 3, 37)
    abstract = nnx.eval_shape(lambda: port.package.Transformer(CONFIG, rngs=nnx.Rngs(0)))
    port.package.set_weights(abstract, random_weights(CONFIG))
    assert_same_bits(abstract.export_weights(), random_weights(CONFIG))


def test_export_and_import(port):
    """As StableHLO, for any batch, without this package. (Lengths are constants: the sinusoids of each are NumPy's.)"""
    import jax
    from flax import nnx

    model = build(port, "float64")
    graph, state = nnx.split(model)
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, length), np.int32) for length in (4, 3)]
    exported = jax.export.export(jax.jit(lambda *ids: nnx.merge(graph, state)(*ids)))(*shapes)
    called = jax.export.deserialize(exported.serialize()).call
    for rows in (slice(0, 2), slice(0, 1)):
        ids = SOURCE[rows], TARGET[rows]
        assert_close(port.to_numpy(called(*map(np.int32, ids))), port.to_numpy(model(*ids)))


def test_no_hidden_transfers(port):
    import jax
    from flax import nnx

    model, ids = build(port, "float64"), jax.device_put((SOURCE, TARGET))
    call, step = nnx.jit(lambda model, *ids: model(*ids)), nnx.jit(lambda model, *state: model.decode_step(*state))
    cache, tokens = model.init_cache(SOURCE, 2), jax.device_put(TARGET[:, 0])
    expected = port.to_numpy(call(model, *ids))
    _, cache = step(model, tokens, cache)  # whose length is an array from here on
    step(model, tokens, cache)
    with jax.transfer_guard("disallow"):
        logits = call(model, *ids)
        step(model, tokens, cache)
    np.testing.assert_array_equal(port.to_numpy(logits), expected)


def test_ensemble(port):
    """Models of one config, side by side in one."""
    import jax
    from flax import nnx

    models = [port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG, seed)) for seed in range(3)]
    graph, _ = nnx.split(models[0])
    stacked = nnx.merge(graph, jax.tree.map(lambda *x: jax.numpy.stack(x), *(nnx.state(model) for model in models)))
    logits = nnx.vmap(lambda model: model(SOURCE, TARGET), in_axes=0)(stacked)
    for i, model in enumerate(models):
        np.testing.assert_allclose(port.to_numpy(logits)[i], port.to_numpy(model(SOURCE, TARGET)), rtol=1e-4, atol=1e-4)
    drawn = nnx.vmap(lambda rngs: port.package.Transformer(CONFIG, rngs=rngs))(nnx.Rngs(0).split(2))
    assert drawn.source_embedding.table.shape == (2, 37, 24)


# In processes of their own: one without float64, and one with two devices.
WITHOUT_FLOAT64 = """
import jax
from flax import nnx
from conftest import tiny_config
import transformer_jax
try:
    transformer_jax.Transformer(tiny_config(), "float64", rngs=nnx.Rngs(0))
except RuntimeError as error:
    print(error)
"""
TWO_DEVICES = """
import jax, numpy as np
from flax import nnx
from conftest import assert_same_bits, random_weights, tiny_config
from test_native import assert_close
import transformer_jax as port
first, second = jax.devices()
SOURCE, TARGET = np.array([[5, 6, 7, 36], [8, 9, 0, 0]]), np.array([[1, 3, 4], [1, 5, 0]])
config = tiny_config(num_encoder_layers=1, num_decoder_layers=1)
weights = random_weights(config)

free = port.Transformer.from_weights(config, weights)
assert free.device is None
bound = port.Transformer.from_weights(config, weights, device="cpu")
assert bound.device == first
with jax.default_device(second):
    there = port.Transformer.from_weights(config, weights)
assert there.source_embedding.table.devices() == {second}

nnx.update(bound, jax.device_put(nnx.state(bound), second))
assert bound.device == second
port.set_weights(bound, weights)
assert bound.device == second
with jax.transfer_guard_device_to_device("disallow"):  # nothing is created elsewhere first
    logits = bound(SOURCE, TARGET, SOURCE != 0)
    cache = bound.init_cache(SOURCE, 2)
    step, cache = bound.decode_step(TARGET[:, 0], cache)
for x in jax.tree.leaves((logits, step, cache)):
    assert isinstance(x, int) or x.devices() == {second}, x
np.testing.assert_array_equal(logits, free(SOURCE, TARGET))
found = port.greedy_search(bound, SOURCE, max_length=3)
np.testing.assert_array_equal(found.ids, port.greedy_search(free, SOURCE, max_length=3).ids)

halves = jax.sharding.NamedSharding(jax.make_mesh((2,), ("model",)), jax.sharding.PartitionSpec(None, "model"))
kernel = free.encoder.layers[0].feed_forward.inner_proj.kernel
kernel.set_value(jax.device_put(kernel.get_value(), halves))
port.set_weights(free, random_weights(config, seed=1))
assert kernel.get_value().sharding == halves
np.testing.assert_array_equal(free.export_weights()["encoder.layers.0.feed_forward.inner_proj.kernel"],
                              random_weights(config, seed=1)["encoder.layers.0.feed_forward.inner_proj.kernel"])
"""


def run_alone(program, **environment):
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_float64_that_is_off_is_an_error():
    assert "jax.config.update('jax_enable_x64', True)" in run_alone(WITHOUT_FLOAT64, JAX_ENABLE_X64="0")


def test_everything_is_where_the_model_is():
    run_alone(TWO_DEVICES, XLA_FLAGS="--xla_force_host_platform_device_count=2")
