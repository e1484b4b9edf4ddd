"""Captures of JAX models: vmap shows the batch, compiled code is skipped, and Linen models are told apart."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
from conftest import Backend
from test_pair_capture import Replay, X

from transformer_parity.pair import capture
from transformer_parity.pairs.contract.arrays import Taps


@pytest.fixture
def jax():
    _ = Backend("jax").package
    import jax

    return jax


def mlp():
    from flax import nnx

    return nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(4, 2, rngs=nnx.Rngs(1)))


def test_functions_without_a_module_keep_their_position(jax):
    seen, model = Replay(), mlp()
    with capture.nnx(model, seen):
        model(X)
    assert [*seen] == ["layers.0", "layers.2"]


@pytest.mark.parametrize("way", ["jit", "cached jit", "nnx.jit", "grad", "no call"])
def test_models_that_run_in_compiled_code_raise(jax, way):
    from flax import nnx

    model, seen = mlp(), Replay()
    compiled = jax.jit(lambda x: model(x))
    if way == "cached jit":
        compiled(X)
    calls = {
        "jit": lambda: compiled(X),
        "cached jit": lambda: compiled(X),
        "nnx.jit": lambda: nnx.jit(lambda model, x: model(x))(model, X),
        "grad": lambda: jax.grad(lambda x: model(x).sum())(X),
        "no call": lambda: mlp()(X),
    }
    with pytest.raises(ValueError, match=r"without nnx\.jit, jax\.jit, and nnx\.vmap"), capture.nnx(model, seen):
        calls[way]()
    assert seen == {}


def test_compiled_layers_of_a_model_are_skipped(jax):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.first, self.second = mlp(), nnx.Linear(2, 2, rngs=nnx.Rngs(2))

        def __call__(self, x):
            x = jax.jit(lambda x: self.first(x))(x)
            return jax.lax.scan(lambda x, _: (self.second(x), None), self.second(x), length=2)[0]

    model, seen = Model(), Replay()
    before = model(X)
    with capture.nnx(model, seen):
        after = model(X)
    assert [*seen] == ["second"]
    np.testing.assert_allclose(before, after)


@pytest.mark.needs(importlib.util.find_spec("equinox"), "equinox")
def test_vmap_of_equinox_layers_shows_the_batch(jax):
    import equinox

    key = jax.random.key(0)
    attention = equinox.nn.MultiheadAttention(2, 4, key=key)

    class Model(equinox.Module):
        attention: equinox.nn.MultiheadAttention
        norm: equinox.nn.LayerNorm
        head: equinox.nn.Linear

        def __call__(self, x):
            x = self.attention(x, x, x)
            return jax.vmap(self.head, in_axes=1, out_axes=1)(jax.vmap(self.norm)(x).T)

    model = Model(attention, equinox.nn.LayerNorm(4), equinox.nn.Linear(4, 2, key=key))
    batch = jax.numpy.asarray(np.random.default_rng(1).normal(size=(3, 5, 4)), "float32")
    before, seen = jax.vmap(model)(batch), Replay()
    with capture.equinox(model, seen):
        after = jax.vmap(model)(batch)
    parts = ("query_proj", "key_proj", "value_proj", "output_proj")
    assert {*seen} == {*(f"attention.{part}" for part in parts), "attention.dropout", "attention", "norm", "head"}
    assert (seen["attention"].shape, seen["head"].shape) == ((3, 5, 4), (3, 5, 2))
    each = [jax.vmap(attention.query_proj)(sample) for sample in batch]
    np.testing.assert_allclose(seen["attention.query_proj"], np.stack(each), rtol=1e-5)
    np.testing.assert_allclose(seen["head"].swapaxes(1, 2), after, rtol=1e-5)
    np.testing.assert_allclose(before, after, rtol=1e-5)
    other = jax.numpy.asarray(np.random.default_rng(2).normal(size=(3, 5, 2)), "float32")
    with capture.equinox(model, Replay({"head": other})):
        assert np.array_equal(jax.vmap(model)(batch), other.swapaxes(1, 2))
    with pytest.raises(ValueError, match="could not be read"), capture.equinox(model, Replay()):
        jax.jit(jax.vmap(model))(batch)


def dense(size):
    from flax import linen

    class Model(linen.Module):
        size: int

        def setup(self):
            self.encoder = linen.Sequential([linen.Dense(3), linen.relu, linen.Dense(self.size)])
            self.rows = linen.vmap(
                linen.Dense, variable_axes={"params": None}, split_rngs={"params": False}, in_axes=0
            )(3)

        def __call__(self, x):
            return self.rows(self.decode(x))

        def decode(self, x):
            return self.encoder(x)

    return Model(size)


def test_linen_methods_and_transformations_are_shown(jax):
    model = dense(3)
    seen = {name: Replay() for name in ("init", "call", "method", "function", "bound", "vmap")}
    with capture.linen(model, seen["init"]):
        variables = model.init(jax.random.key(0), X)
        model.apply(variables, X[:1])
    names = ["encoder.layers_0", "encoder.layers_2", "encoder"]
    with capture.linen(model, seen["call"]):
        model.apply(variables, X)
    with capture.linen(model, seen["method"]):
        model.apply(variables, X, method="decode")
    with capture.linen(model, seen["function"]):
        model.apply(variables, X, method=lambda self, x: self.encoder(x))
    bound = model.bind(variables)
    with capture.linen(bound, seen["bound"]):
        bound(X)
    with capture.linen(model, seen["vmap"]):
        jax.vmap(lambda x: model.apply(variables, x))(X)
    assert [*seen["init"]] == [*seen["call"]] == [*seen["bound"]] == [*seen["vmap"]] == [*names, "rows"]
    assert [*seen["method"]] == [*seen["function"]] == names
    for name, value in seen["call"].items():
        np.testing.assert_allclose(seen["vmap"][name], value, rtol=1e-5)


def test_linen_models_inside_and_beside_the_model_are_not_shown(jax):
    from flax import linen

    teacher, model = dense(2), dense(2)
    variables = model.init(jax.random.key(0), X)

    class Student(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3)(x) + teacher.apply(variables, x)

    seen, student, others = Replay(), Student(), Replay()
    weights = student.init(jax.random.key(0), X)
    with capture.linen(student, seen), capture.linen(model, others):
        student.apply(weights, X)
        model.apply(variables, X)
    assert ([*seen], len(others)) == (["Dense_0"], 4)
    with pytest.raises(ValueError, match=r"without jax\.jit"), capture.linen(model, Replay()):
        jax.jit(model.apply)(variables, X)
    with capture.linen(model, Replay()), capture.linen(model, seen):
        model.apply(variables, X)
    assert "clone" not in vars(model)


def test_tap_can_be_an_attribute_of_a_linen_module(jax):
    from flax import linen

    class Layer(linen.Module):
        tap: Callable

        @linen.compact
        def __call__(self, x):
            return self.tap("y", linen.Dense(3)(x))

    weights = Layer(lambda name, value: value).init(jax.random.key(0), X)
    taps = Taps()
    output = Layer(taps).apply(weights, X)
    assert np.array_equal(taps.values["y"], output)
