"""Captures show the outputs of all layers in every framework, and leave no traces in the models or classes."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from collections import OrderedDict, namedtuple
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from conftest import Backend

from transformer_parity.pair import capture

BACKENDS = {"jax-nnx": "jax", "jax-linen": "jax", "jax-equinox": "jax", "tf-keras": "tf", "torch": "torch", "mlx": None}
LIBRARIES = {"jax-equinox": "equinox", "mlx": "mlx"}
X = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
# The names of the taps of every model below, in the order in which they fire.
NAMES = (
    *("first", "blocks.0.linear", "blocks.0.0", "blocks.0.1.gate"),
    *("blocks.1.linear", "blocks.1.0", "blocks.1.1.gate", "last", "last#1"),
)


def needs(name: str):
    """Return the mark of a test that needs a library."""
    return pytest.mark.needs(importlib.util.find_spec(name), name)


class Replay(dict):
    """Record the computed values, and replace some of them."""

    def __init__(self, replacements=()):
        super().__init__()
        self.replacements = dict(replacements)

    def __call__(self, name, value):
        assert name not in self
        self[name] = to_numpy(value)
        return self.replacements.get(name, value)


def to_numpy(value):
    return np.array(value.detach().numpy() if hasattr(value, "detach") else value)


def torch_model():
    from torch import nn, tensor

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            y = self.linear(x)
            return x + y, {"gate": 2 * y, "kind": "text"}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.last = nn.Linear(3, 3)
            self.alias = self.last

        forward = forward

    return Model(), None, tensor


def forward(self, x):
    x = self.first(x)
    for block in self.blocks:
        x, extra = block(x)
        x = x + extra["gate"]
    return self.last(self.alias(x))


def nnx_model():
    import jax
    from flax import nnx

    rngs = nnx.Rngs(0)

    class Base(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            y = self.linear(x)
            return x + y, {"gate": 2 * y, "kind": "text"}

    class Block(Base):
        def __call__(self, x):
            return super().__call__(x)

    class Model(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(3, 3, rngs=rngs)
            self.blocks = nnx.List([Block(), Base()])
            self.last = nnx.Linear(3, 3, rngs=rngs)
            self.alias = self.last

        __call__ = forward

    return Model(), None, jax.numpy.array


def linen_model():
    import jax
    from flax import linen

    class Base(linen.Module):
        def setup(self):
            self.linear = linen.Dense(3)

        def __call__(self, x):
            y = self.linear(x)
            return x + y, {"gate": 2 * y, "kind": "text"}

    class Block(Base):
        def __call__(self, x):
            return super().__call__(x)

    class Model(linen.Module):
        def setup(self):
            self.first = linen.Dense(3)
            self.blocks = [Block(), Base()]
            self.last = linen.Dense(3)
            self.alias = self.last

        __call__ = forward

    model = Model()
    variables = model.init(jax.random.key(0), X)
    return model, lambda x: model.apply(variables, x), jax.numpy.array


def equinox_model():
    import equinox
    import jax

    keys = iter(jax.random.split(jax.random.key(0), 4))

    class Linear(equinox.Module):  # equinox.nn.Linear accepts one vector
        weight: jax.Array
        bias: jax.Array

        def __init__(self):
            self.weight, self.bias = jax.random.normal(next(keys), (4, 3))[:3], jax.numpy.ones(3)

        def __call__(self, x):
            return x @ self.weight + self.bias

    class Block(equinox.Module):
        linear: Linear

        def __call__(self, x):
            y = self.linear(x)
            return x + y, {"gate": 2 * y, "kind": "text"}

    class Model(equinox.Module):
        first: Linear
        blocks: list
        last: Linear
        alias: Linear

        __call__ = forward

    first, blocks, last = Linear(), [Block(Linear()), Block(Linear())], Linear()
    return Model(first, blocks, last, last), None, jax.numpy.array


def keras_model():
    import keras
    import tensorflow

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.linear = keras.layers.Dense(3)

        def call(self, x):
            y = self.linear(x)
            return x + y, {"gate": 2 * y, "kind": "text"}

        def compute_output_spec(self, x):
            return x, {"gate": x, "kind": "text"}

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(3)
            self.blocks = [Block(), Block()]
            self.last = keras.layers.Dense(3)
            self.alias = self.last

        call = forward

    return Model(), None, tensorflow.constant


def mlx_model():
    import mlx.core
    from mlx import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def __call__(self, x):
            y = self.linear(x)
            return x + y, {"gate": 2 * y, "kind": "text"}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.blocks = [Block(), Block()]
            self.last = nn.Linear(3, 3)
            self.alias = self.last

        __call__ = forward

    return Model(), None, mlx.core.array


def marks(name):
    return [
        *([pytest.mark.only(BACKENDS[name])] if BACKENDS[name] else []),
        *map(needs, LIBRARIES.get(name, "").split()),
    ]


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in BACKENDS])
def make(request):
    """Return a function that builds a model, its capture, a function that runs it, and one that converts arrays."""
    if BACKENDS[request.param]:
        _ = Backend(BACKENDS[request.param]).package
    name = request.param.rpartition("-")[2]

    def made():
        model, call, array = globals()[f"{name}_model"]()
        return SimpleNamespace(
            name=name,
            model=model,
            call=call or model,
            array=array,
            capture=lambda tap: getattr(capture, name)(model, tap),
            names=[path.replace("blocks.", "blocks_") if name == "linen" else path for path in NAMES],
        )

    return made


def named(seen):
    return {name.replace("blocks_", "blocks."): value for name, value in seen.items()}


def test_all_outputs_of_submodules_are_shown_in_order(make):
    made, seen = make(), Replay()
    x = made.array(X)
    before = made.call(x)
    with made.capture(seen):
        during = made.call(x)
    assert list(seen) == made.names
    seen = named(seen)
    assert np.array_equal(seen["blocks.0.1.gate"], 2 * seen["blocks.0.linear"])
    assert np.array_equal(seen["blocks.0.0"], seen["first"] + seen["blocks.0.linear"])
    assert all(np.array_equal(to_numpy(other), seen["last#1"]) for other in (before, during, made.call(x)))
    assert len(seen) == len(NAMES)


def test_replaced_values_change_the_rest_of_the_computation(make):
    made, plain = make(), Replay()
    with made.capture(plain):
        made.call(made.array(X))
    gate, last = (next(name for name in plain if name.endswith(end)) for end in ("0.1.gate", "last"))
    replay = Replay({gate: made.array(np.zeros_like(X)), last: made.array(np.ones_like(X))})
    with made.capture(replay):
        out = made.call(made.array(X))
    replay, plain = named(replay), named(plain)
    same = [name for name in plain if np.array_equal(plain[name], replay[name])]
    assert same == list(NAMES[:4])  # the computed values are recorded
    np.testing.assert_allclose(replay["blocks.1.0"], replay["blocks.1.linear"] + plain["blocks.0.0"], rtol=1e-5)
    assert np.array_equal(to_numpy(out), replay["last#1"])
    assert np.ptp(to_numpy(out), axis=(0, 1)).max() < 1e-6


def test_nothing_is_shown_after_the_block_or_an_exception(make):
    made, seen = make(), Replay()
    x = made.array(X)
    made.call(x)
    calls = {kind: kind.__call__ for kind in type(made.model).__mro__ if "__call__" in vars(kind)}

    def broken(name, value):
        raise KeyError(name)

    with pytest.raises(KeyError, match="first"), made.capture(broken):
        made.call(x)
    with pytest.raises(ZeroDivisionError), made.capture(seen):
        raise ZeroDivisionError
    made.call(x)
    assert seen == {}
    assert capture._patched == {}
    assert {kind: kind.__call__ for kind in calls} == calls
    assert "clone" not in vars(made.model)


def test_other_models_of_the_same_class_are_not_shown(make):
    made, other, seen, others = make(), make(), Replay(), Replay()
    x = made.array(X)
    for each in (made, other):
        each.call(x)
    first, second = made.capture(seen), other.capture(others)
    with first, second:
        other.call(x)
        assert (len(seen), len(others)) == (0, len(NAMES))
        made.call(x)
    assert (len(seen), len(others)) == (len(NAMES), len(NAMES))
    assert capture._patched == {}


def test_blocks_can_end_in_any_order(make):
    made, other, seen, others = make(), make(), Replay(), Replay()
    x = made.array(X)
    for each in (made, other):
        each.call(x)
    ends = [(made.capture(seen), made), (other.capture(others), other)]
    for block, _ in ends:
        block.__enter__()
    if made.name == "linen":  # intercept_methods requires the order of a stack
        ends.reverse()
    for block, each in ends:
        each.call(x)
        block.__exit__(None, None, None)
        each.call(x)
    assert (len(seen), len(others)) == (len(NAMES), len(NAMES))
    assert capture._patched == {}


# --- Outputs of any structure ---

Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object
    name: str = "text"


@dataclasses.dataclass
class Output(OrderedDict):
    """A dict whose items are also attributes and that has no update method, as in Hugging Face."""

    x: object = None

    def __post_init__(self):
        self["x"] = self.x

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def update(self, *args):
        raise TypeError


STRUCTURES = {
    "tuple": (lambda x: (x, None, [x]), ["0", "2.0"], lambda out: (out[0], out[2][0])),
    "list": (lambda x: [x, "text"], ["0"], lambda out: (out[0],)),
    "dict": (lambda x: {"a": x, 5: 1.5}, ["a"], lambda out: (out["a"],)),
    "read-only mapping": (lambda x: MappingProxyType({"a": x}), ["a"], lambda out: (out["a"],)),
    "named tuple": (lambda x: Point(x, 3), ["x"], lambda out: (out.x,)),
    "dataclass": (Frozen, ["x"], lambda out: (out.x,)),
    "dataclass and dict": (Output, ["x"], lambda out: (out.x, out["x"])),
    "bool": (lambda x: (x > 0, x.int()), ["1"], lambda out: (out[1],)),
    "dataclass type": (lambda x: (x, Frozen), ["0"], lambda out: (out[0],)),
}


@pytest.mark.only("torch")
@pytest.mark.parametrize("name", STRUCTURES)
def test_torch_arrays_in_an_output_are_shown_and_replaced(name):
    import torch

    make, keys, read = STRUCTURES[name]

    class Layer(torch.nn.Module):
        def forward(self, x):
            self.output = make(x)
            return self.output

    model = torch.nn.Sequential(Layer(), torch.nn.Identity())
    shown = []

    def tap(name, value):
        shown.append(name)
        return value + 1 if name.startswith("0.") else value

    x = torch.zeros(2)
    with capture.torch(model, tap):
        out = model(x)
    assert shown == [f"{i}.{key}" if i else f"0.{key}" for i in (0, 1) for key in keys]
    plain = model[0].output  # the tap's results are in a copy
    assert type(out) is type(plain)
    assert [float(value.sum()) for value in read(out)] == [2.0] * len(read(out))
    assert [float(value.sum()) for value in read(plain)] == [0.0] * len(read(out))


@pytest.mark.only("torch")
def test_torch_names_of_outputs_and_submodules_never_collide():
    import torch

    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.LSTM(3, 2)))
    seen = Replay()
    with capture.torch(model, seen):
        model(torch.ones(4, 3))
    assert [*seen][:4] == ["0.0.0", "0.0.1.0", "0.0.1.1", "0.0"]


@pytest.mark.only("torch")
def test_torch_fast_path_of_transformers_is_disabled_in_the_block():
    import torch

    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    seen = Replay()
    padding = torch.tensor([[False, False, False], [False, False, True]])
    with torch.no_grad(), capture.torch(model, seen):
        model(torch.ones(2, 3, 8), src_key_padding_mask=padding)
    assert {"layers.0.self_attn.0", "layers.1.linear2", "layers.1"} <= seen.keys()
    assert seen["layers.1"].shape == (2, 3, 8)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.only("torch")
def test_torch_compiled_models_run_without_compilation():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1] = torch.compile(model[1], backend="eager")
    seen = Replay()
    with capture.torch(torch.compile(model, backend="eager"), seen):
        model(torch.ones(1, 2))
    assert [*seen] == ["0", "1"]


@pytest.mark.only("torch")
def test_torch_script_is_refused():
    import torch

    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        script = torch.jit.trace(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(1))
    with pytest.raises(ValueError, match="pass the original model"), capture.torch(script, Replay()):
        pass


@pytest.mark.only("torch")
def test_torch_model_that_is_not_called_raises():
    import torch

    message = r"could not be read: call the model in the with block"
    with pytest.raises(ValueError, match=message), capture.torch(torch.nn.Sequential(torch.nn.ReLU()), Replay()):
        pass
    with pytest.raises(TypeError, match=r"^model must be a torch.nn.Module: got str$"), capture.torch("x", Replay()):
        pass


# --- MLX ---


@needs("mlx")
def test_mlx_compiled_models_raise():
    import mlx.core

    model, _, array = mlx_model()
    for transform in (mlx.core.compile, mlx.core.vmap):
        seen = Replay()
        with pytest.raises(ValueError, match="without mlx"), capture.mlx(model, seen):
            transform(model)(array(X))
        assert seen == {}


def test_importing_the_module_imports_no_framework():
    code = "import sys, transformer_parity.pair; print({'torch', 'jax', 'keras', 'onnx', 'mlx'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
