"""Common uses of JAX and Flax NNX modules also work with this model."""

from __future__ import annotations

import copy
import logging
import pickle
import re

import numpy as np
import pytest
import tiers
from conftest import assert_same_bits, random_weights, tiny_config
from native_models import (
    BATCH,
    LABELS,
    NO_DROPOUT,
    ONE_LAYER,
    SETTINGS,
    SOURCE,
    TARGET,
    assert_close,
    build,
    losses,
    run_alone,
)

import reference_numpy as ref
from reference_numpy import TrainingConfig

pytestmark = pytest.mark.only("jax")

CONFIG = tiny_config(num_encoder_layers=1, num_decoder_layers=1)


@pytest.mark.parametrize("tie", tiers.first_alone(["all", "target_output"], "ties"))
def test_tied_embedding_is_a_single_parameter(port, tie):
    import jax
    from flax import nnx

    model = build(port, dtype="float32", tie_embeddings=tie)
    for twin in (model, nnx.clone(model), nnx.merge(*nnx.split(model))):
        assert twin.output_proj.embedding is twin.target_embedding
        leaves = jax.tree.leaves(nnx.state(twin, nnx.Param))
        assert sum(leaf.size for leaf in leaves) == ref.count_parameters(model.config)
    gradients = nnx.jit(nnx.grad(lambda model: model(SOURCE, TARGET).sum()))(model)
    assert len(jax.tree.leaves(gradients)) == len(leaves)


def test_layers_can_be_copied_and_pickled(port):
    """Every module in the package can be copied, because none stores a function that can't be pickled."""
    from flax import nnx

    model = build(port, "float32", activation="gelu_tanh", dropout=dict.fromkeys(NO_DROPOUT, 0.1))
    x = np.ones((2, 4, 24), np.float32)
    for part in (model.encoder, model.source_embedding, model.output_proj):
        for twin in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            for (_, ours), (_, theirs) in zip(nnx.iter_modules(part), nnx.iter_modules(twin), strict=True):
                assert type(ours) is type(theirs)
                assert ours is not theirs
    np.testing.assert_array_equal(copy.deepcopy(model.encoder)(x), model.encoder(x))


# --- Training ---


def test_later_steps_do_not_change_a_clone(port):
    """Users can keep the best model so far as a clone, as arrays, or as exported weights."""
    import jax
    from flax import nnx

    trainer = port.package.Trainer(build(port), SETTINGS)
    trainer.train_step(*BATCH)
    model = trainer.model
    best, arrays, kept = nnx.clone(model), jax.tree.leaves(nnx.state(model, nnx.Param)), model.export_weights()
    values, logits = [np.array(array) for array in arrays], port.to_numpy(best(SOURCE, TARGET))
    losses(trainer)
    assert_same_bits(best.export_weights(), kept)
    np.testing.assert_array_equal(port.to_numpy(best(SOURCE, TARGET)), logits)
    for array, value in zip(arrays, values, strict=True):
        np.testing.assert_array_equal(array, value)


def test_second_train_step_does_not_recompile(port, caplog):
    """The second step isn't recompiled, even though the constructor's arrays aren't committed to a device."""
    import jax
    from flax import nnx

    model = port.package.Transformer(tiny_config(**ONE_LAYER), rngs=nnx.Rngs(0))
    trainer = port.package.Trainer(model, SETTINGS)
    trainer.train_step(*BATCH)
    with caplog.at_level(logging.DEBUG, "jax"), jax.log_compiles():
        trainer.train_step(*BATCH)
        trainer.load_state(trainer.export_state())
        trainer.train_step(*BATCH)
        assert "Compiling" not in caplog.text
        jax.jit(lambda x: x + 1)(np.ones(5)).block_until_ready()
        assert "Compiling" in caplog.text  # shows that compilations are logged


# Runs in a separate process in which JAX treats the CPU as two devices.
SHARDED = """
import jax, numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import transformer_jax as port
from conftest import random_weights, tiny_config
from test_native_jax import BATCH, SETTINGS, losses

jax.config.update("jax_enable_x64", True)
config = tiny_config(num_encoder_layers=1, num_decoder_layers=1, source_vocab_size=38, target_vocab_size=38)
mesh = Mesh(np.array(jax.devices()), ("model",))

def trainer(place):
    model = port.Transformer.from_weights(config, random_weights(config), dtype="float64")
    for _, parameter in nnx.iter_graph(model):
        if isinstance(parameter, nnx.Param):
            rows = PartitionSpec("model") if parameter.ndim == 2 else PartitionSpec()
            parameter.set_value(place(parameter.get_value(), NamedSharding(mesh, rows)))
    return port.Trainer(model, SETTINGS)

def shardings(trainer):
    table = trainer.model.source_embedding.embedding.get_value()
    return [array.sharding for array in (table, *(getattr(trainer.optimizer, name)["source_embedding.table"]
                                                  for name in ("first_moment", "second_moment")))]

alone, sharded = trainer(lambda array, sharding: array), trainer(jax.device_put)
wanted = [NamedSharding(mesh, PartitionSpec("model"))] * 3
assert shardings(sharded) == wanted, shardings(sharded)
np.testing.assert_allclose(losses(sharded), losses(alone), rtol=1e-12)
assert all(a.is_equivalent_to(b, 2) for a, b in zip(shardings(sharded), wanted)), shardings(sharded)
sharded.load_state(alone.export_state())
assert all(a.is_equivalent_to(b, 2) for a, b in zip(shardings(sharded), wanted)), shardings(sharded)
np.testing.assert_allclose(losses(sharded), losses(alone), rtol=1e-12)
"""


@pytest.mark.extended("devices")
def test_sharded_parameters_keep_their_sharding_in_training():
    """Moments have the same sharding as the parameters, even after a state is loaded."""
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    run_alone(SHARDED, XLA_FLAGS=flags)


@pytest.mark.parametrize("name", tiers.first_alone(["adamw", "adafactor", "lion"], "optimizers"))
def test_any_optax_optimizer_reduces_the_loss(port, name):
    """Any Optax optimizer works with our loss under jit, including a schedule, clipping, and a mask."""
    import jax
    import optax
    from flax import nnx

    model = port.package.Transformer(tiny_config(**ONE_LAYER), rngs=nnx.Rngs(0))
    schedule = optax.linear_schedule(0.0, 0.01 if name != "lion" else 0.003, 3)
    wide = lambda parameters: jax.tree.map(lambda array: array.ndim > 1, parameters)  # noqa: E731
    decay = optax.add_decayed_weights(1e-4, mask=wide)
    rule = optax.chain(optax.clip_by_global_norm(1.0), getattr(optax, name)(schedule), decay)
    optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            total, tokens = port.package.cross_entropy(model(SOURCE, TARGET), LABELS, model.config)
            return total / tokens

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    found = [float(step(model, optimizer)) for _ in range(10)]
    assert found[-1] < 0.9 * found[0]


def test_orbax_checkpoint_round_trips(port, tmp_path):
    import orbax.checkpoint as ocp
    from flax import nnx

    model = build(port, dtype="float32", tie_embeddings="all")
    fresh = port.package.Transformer.from_weights(model.config, random_weights(model.config, seed=1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(model, nnx.Param))
        checkpointer.wait_until_finished()
        nnx.update(fresh, checkpointer.restore(tmp_path / "model", nnx.state(fresh, nnx.Param)))
    assert_same_bits(fresh.export_weights(), model.export_weights())
    np.testing.assert_array_equal(port.to_numpy(fresh(SOURCE, TARGET)), port.to_numpy(model(SOURCE, TARGET)))


def test_decode_step_does_not_modify_its_cache(port):
    model = build(port, "float64")
    empty = model.init_cache(SOURCE, 3)
    first, one = model.decode_step(TARGET[:, 0], empty)
    assert (int(empty.length), int(one.length)) == (0, 1)
    again, _ = model.decode_step(TARGET[:, 0], empty)
    np.testing.assert_array_equal(port.to_numpy(again), port.to_numpy(first))


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copied_and_pickled_models_preserve_weights_and_ties(port, way):
    model = port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG), device="cpu", precision="highest")
    twin = way(model)
    assert twin.source_embedding is twin.target_embedding
    np.testing.assert_array_equal(port.to_numpy(twin(SOURCE, TARGET)), port.to_numpy(model(SOURCE, TARGET)))
    port.package.set_weights(twin, random_weights(CONFIG, seed=1))
    assert_same_bits(model.export_weights(), random_weights(CONFIG))


def test_precision_applies_only_to_the_matmuls_of_the_model(port):
    """A model's ``precision`` applies only to its own matmuls, forward and backward. None uses the global setting."""
    import jax
    from flax import nnx

    def loss(model):
        step, _ = model.decode_step(TARGET[:, 0], model.init_cache(SOURCE, 1))
        return (model(SOURCE, TARGET) ** 2).sum() + step.sum()

    with jax.default_matmul_precision(None):  # undoes other tests' settings
        for precision, expected in ((None, ""), ("highest", "Precision.HIGHEST"), ("fast", "Precision.HIGH")):
            model = port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG), precision=precision)
            graph, state = nnx.split(model)
            gradient = jax.grad(lambda state, graph=graph: loss(nnx.merge(graph, state)), allow_int=True)
            text = str(jax.make_jaxpr(gradient)(state))
            products, found = text.count("dot_general["), re.findall(r"precision=\(?([\w.]+)", text)
            assert products > 50
            assert found == ([expected] * products if precision else []), set(found)
            assert jax.config.jax_default_matmul_precision is None


def test_gradient_norm_ignores_the_matmul_precision(port):
    """The gradient norm scales every update, so it ignores the matmul precision of the process and the model."""
    import jax

    with jax.default_matmul_precision("tensorfloat32"):
        text = str(jax.make_jaxpr(port.package.optimizer.global_norm)({"a": np.ones((2, 3)), "b": np.ones(4)}))
    assert re.findall(r"precision=\(?([\w.]+)", text) == ["Precision.HIGHEST"] * 2


def test_loading_a_model_does_not_initialize_weights(port, monkeypatch):
    import jax
    from flax import nnx

    def draw(key, shape, dtype):
        if not isinstance(key, jax.core.Tracer):
            raise AssertionError("an initial value is drawn")
        return jax.numpy.zeros(shape, dtype)

    for name in ("xavier_uniform", "normal"):
        monkeypatch.setattr(nnx.initializers, name, lambda *args: draw)
    config = CONFIG.replace(tie_embeddings="none", output_bias=True, position_encoding="learned")
    weights = random_weights(config)
    for device in (None, "cpu"):
        model = port.package.Transformer.from_weights(config, weights, device=device)
        assert_same_bits(model.export_weights(), weights)
    with pytest.raises(AssertionError, match="is drawn"):
        port.package.Transformer(config, rngs=nnx.Rngs(0))


@pytest.mark.extended("framework idioms")
def test_model_works_with_strict_dtype_promotion(port):
    """JAX never has to promote two dtypes to a third, except in Flax's LayerNorm if the dtype isn't float32."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        model = build(port, "float32", layer_norm_kind="annotated")
        port.package.gradients(model, *BATCH)
        trainer = port.package.Trainer(model, TrainingConfig(clip_norm=0.1))
        losses(trainer, 1)
        trainer.evaluate(*BATCH)
        port.package.beam_search(model, SOURCE, max_length=3)


def test_eval_shape_returns_shapes_without_computing(port):
    from flax import nnx

    model = build(port, "float64")
    assert nnx.eval_shape(lambda model: model(SOURCE, TARGET), model).shape == (2, 3, 37)
    abstract = nnx.eval_shape(lambda: port.package.Transformer(CONFIG, rngs=nnx.Rngs(0)))
    port.package.set_weights(abstract, random_weights(CONFIG))
    assert_same_bits(abstract.export_weights(), random_weights(CONFIG))


def test_exported_model_runs_without_the_package(port):
    """A model exported as StableHLO runs without this package, for any batch size but only for fixed lengths.

    Lengths are fixed because NumPy computes the positional encodings for each length.
    """
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


def test_compiled_calls_make_no_implicit_transfers(port):
    import jax
    from flax import nnx

    model, ids = build(port, "float64"), jax.device_put((SOURCE, TARGET))
    call, step = nnx.jit(lambda model, *ids: model(*ids)), nnx.jit(lambda model, *state: model.decode_step(*state))
    cache, tokens = model.init_cache(SOURCE, 2), jax.device_put(TARGET[:, 0])
    expected = port.to_numpy(call(model, *ids))
    _, cache = step(model, tokens, cache)  # from here on, the cache's length is an array
    step(model, tokens, cache)
    with jax.transfer_guard("disallow"):
        logits = call(model, *ids)
        step(model, tokens, cache)
    np.testing.assert_array_equal(port.to_numpy(logits), expected)


@pytest.mark.extended("framework idioms")
def test_stacked_models_run_as_one(port):
    """Multiple models with the same config can be stacked and run as one."""
    import jax
    from flax import nnx

    models = [
        port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG, seed), "float64") for seed in range(3)
    ]
    graph, _ = nnx.split(models[0])
    stacked = nnx.merge(graph, jax.tree.map(lambda *x: jax.numpy.stack(x), *(nnx.state(model) for model in models)))
    logits = nnx.vmap(lambda model: model(SOURCE, TARGET), in_axes=0)(stacked)
    for i, model in enumerate(models):
        assert_close(port.to_numpy(logits)[i], port.to_numpy(model(SOURCE, TARGET)))
    drawn = nnx.vmap(lambda rngs: port.package.Transformer(CONFIG, rngs=rngs))(nnx.Rngs(0).split(2))
    assert drawn.source_embedding.embedding.shape == (2, 37, 24)


def test_quick_compilation_ends_with_its_context(port):
    runtime = port.package.runtime
    with runtime.quick_compilation():
        assert runtime.compiler_options()["xla_backend_optimization_level"] == 0
        with pytest.raises(KeyError), runtime.quick_compilation():
            raise KeyError
        assert runtime.compiler_options()
    assert runtime.compiler_options() == {}


def test_quick_compilation_omits_options_that_xla_lacks(port, monkeypatch):
    """The options are determined only once, possibly while compilation is disabled."""
    import jax

    runtime = port.package.runtime
    monkeypatch.setattr(runtime, "_INTERNAL_OPTIONS", {"absent": 1, "xla_cpu_parallel_codegen_split_count": 1})
    monkeypatch.setattr(runtime, "_quick_options", runtime._quick_options.__wrapped__)  # without its cache
    with jax.disable_jit(), runtime.quick_compilation():
        assert runtime.compiler_options().keys() == {
            "xla_backend_optimization_level",
            "xla_cpu_parallel_codegen_split_count",
        }


def test_quick_compilation_changes_no_result(port, monkeypatch):
    """Trainers and searches use the context's compiler options, and all of them return the same results."""
    import jax

    seen, jit = [], jax.jit

    def record(function, *, compiler_options=None, **options):
        seen.append(compiler_options)
        return jit(function, compiler_options=compiler_options, **options)

    monkeypatch.setattr(jax, "jit", record)
    models = [
        build(port, num_encoder_layers=1, layer_norm_epsilon=3e-6) for _ in range(2)
    ]  # a configuration that hasn't been compiled yet
    with port.package.runtime.quick_compilation():
        quick = port.package.Trainer(models[0], SETTINGS)
        found = port.package.beam_search(models[0], SOURCE, max_length=4)
    usual = port.package.Trainer(models[1], SETTINGS)
    expected = port.package.beam_search(models[1], SOURCE, max_length=4)
    assert {"xla_backend_optimization_level": 0}.items() <= next(filter(None, seen)).items()
    assert quick._compiled_step is not usual._compiled_step
    assert {} in seen
    np.testing.assert_array_equal(found.nbest_ids, expected.nbest_ids)
    assert_close(found.nbest_scores, expected.nbest_scores)
    for trainer in (quick, usual):
        trainer.train_step(*BATCH)
    for name, weight in quick.model.export_weights().items():
        assert_close(weight, usual.model.export_weights()[name])


# Runs in a process with two devices.
TWO_DEVICES = """
import jax, numpy as np
from flax import nnx
from conftest import assert_same_bits, random_weights, tiny_config
from native_models import NO_DROPOUT, assert_close
from reference_numpy import TrainingConfig
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
assert there.source_embedding.embedding.devices() == {second}
port.set_weights(there, weights)
assert there.source_embedding.embedding.devices() == {second} and there.device is None

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
trainer = port.Trainer(bound, TrainingConfig())
with jax.transfer_guard_device_to_device("disallow"):
    trainer.evaluate(SOURCE, TARGET, TARGET)
np.testing.assert_array_equal(logits, free(SOURCE, TARGET))
found = port.greedy_search(bound, SOURCE, max_length=3)
np.testing.assert_array_equal(found.ids, port.greedy_search(free, SOURCE, max_length=3).ids)
with jax.transfer_guard_device_to_device("disallow"):
    trainer.train_step(SOURCE, TARGET, TARGET)
    trainer.load_state(trainer.export_state())
for x in jax.tree.leaves((nnx.state(bound, nnx.Param), trainer.optimizer)):
    assert x.devices() == {second}, x

halves = jax.sharding.NamedSharding(jax.make_mesh((2,), ("model",)), jax.sharding.PartitionSpec(None, "model"))
kernel = free.encoder.layers[0].feed_forward.inner_proj.kernel
kernel.set_value(jax.device_put(kernel.get_value(), halves))
port.set_weights(free, random_weights(config, seed=1))
assert kernel.get_value().sharding == halves
np.testing.assert_array_equal(free.export_weights()["encoder.layers.0.feed_forward.inner_proj.kernel"],
                              random_weights(config, seed=1)["encoder.layers.0.feed_forward.inner_proj.kernel"])
"""


@pytest.mark.extended("devices")
def test_all_arrays_are_on_the_device_of_the_model():
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    run_alone(TWO_DEVICES, XLA_FLAGS=flags)


def test_memory_is_not_affected_by_later_changes_to_the_array(port):
    """Later changes to the caller's array don't affect the memory."""
    memory = np.zeros(2 * 4 * 24 + 16)
    memory = memory[-memory.ctypes.data % 64 // 8 :][: 2 * 4 * 24].reshape(2, 4, 24)  # JAX could alias it
    taken = port.package.runtime.to_memory(memory, (2, 4, 24), "float64")
    memory += 1.0
    assert not port.to_numpy(taken).any()
