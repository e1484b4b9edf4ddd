"""What users of JAX and Flax NNX do with any module works with this one."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config
from test_native import ONE_LAYER, SOURCE, TARGET, build

import reference_numpy as ref
from reference_numpy import TrainingConfig

pytestmark = pytest.mark.only("jax")

LABELS = np.array([[3, 4, 2], [5, 2, 0]])
BATCH = SOURCE, TARGET, LABELS
SETTINGS = TrainingConfig(warmup_steps=4, learning_rate_factor=0.5)


def losses(trainer, steps=3):
    return [float(trainer.train_step(*BATCH).loss) for _ in range(steps)]


@pytest.mark.parametrize("tie", ["target_output", "all"])
def test_a_tied_table_is_one_parameter_in_two_places(port, tie):
    import jax
    from flax import nnx

    model = build(port, dtype="float32", tie_embeddings=tie)
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

    model = build(
        port, dtype="float32", activation=activation, dropout={"residual": 0.1, "feed_forward": 0.1, "attention": 0.1}
    )
    x = np.ones((2, 4, 24), np.float32)
    for part in (model.encoder, model.source_embedding, model.output_proj):
        for twin in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            for (_, ours), (_, theirs) in zip(nnx.iter_modules(part), nnx.iter_modules(twin), strict=True):
                assert type(ours) is type(theirs)
                assert ours is not theirs
    np.testing.assert_array_equal(copy.deepcopy(model.encoder)(x), model.encoder(x))


# --- Training ---


def test_a_clone_between_two_steps_survives(port):
    """The best model so far, in whatever way it is kept."""
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


def test_a_trainer_takes_a_model_as_it_is(port, caplog):
    """Built by the constructor, its arrays are bound to no device; the second step compiles nothing all the same."""
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
        assert "Compiling" in caplog.text  # a compilation is seen


# In a process of its own, which takes the CPU for two devices.
SHARDED = """
import jax, numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import transformer_jax as port
from conftest import random_weights, tiny_config
from test_native_jax import BATCH, SETTINGS, losses

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
    table = trainer.model.source_embedding.table.get_value()
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


def test_sharded_parameters_are_trained_where_they_are():
    """Moments lie where the parameters do, also after a state was loaded."""
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion"])
def test_any_optax_optimizer(port, name):
    """With a schedule, clipping and a mask; our loss, under jit."""
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


def test_orbax_saves_and_restores(port, tmp_path):
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
