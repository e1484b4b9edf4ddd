"""What users of JAX and Flax NNX do with any module works with this one."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from conftest import random_weights, tiny_config

import reference_numpy as ref

pytestmark = pytest.mark.only("jax")

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])


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
    model = build(port)
    empty = model.init_cache(SOURCE, 3)
    first, one = model.decode_step(TARGET[:, 0], empty)
    assert (int(empty.length), int(one.length)) == (0, 1)
    again, _ = model.decode_step(TARGET[:, 0], empty)
    np.testing.assert_array_equal(port.to_numpy(again), port.to_numpy(first))
