"""What users of PyTorch do with any module works with this one."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import random_weights, tiny_config

import reference_numpy as ref

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.only("torch")

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])


def build(port, dtype="float64", **overrides):
    config = tiny_config(**{"num_encoder_layers": 1, "num_decoder_layers": 1, **overrides})
    return port.package.Transformer.from_weights(config, random_weights(config), dtype)


TIES = {
    "as built": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "to": lambda model: model.to(torch.float32).to(torch.float64),
    "to_empty": lambda model: _refilled(model.to_empty(device="cpu")),
}


def _refilled(model):
    """Return a model that was left without values, with those that it had."""
    ref.weights.check_weights(model.config, weights := random_weights(model.config))
    torch_package = __import__("transformer_torch")
    torch_package.set_weights(model, weights)
    return model


@pytest.mark.parametrize("tie", ["target_output", "all"])
@pytest.mark.parametrize("way", TIES)
def test_a_tied_table_is_one_parameter_in_two_places(port, tie, way):
    model = TIES[way](build(port, tie_embeddings=tie))
    table = model.output_proj.weight
    assert table is model.target_embedding.table
    assert sum(parameter is table for parameter in model.parameters()) == 1
    assert sum(p.numel() for p in model.parameters()) == ref.count_parameters(model.config)
    assert {"output_proj.weight", "target_embedding.table"} <= model.state_dict().keys()
    model(SOURCE, TARGET).sum().backward()
    assert table.grad.abs().sum() > 0


def test_a_tied_table_of_a_model_on_the_meta_device(port):
    """Shapes first, memory then, values last: the way large models are built."""
    with torch.device("meta"):
        model = port.package.Transformer(tiny_config(tie_embeddings="target_output"), "float64")
    model.to_empty(device="cpu")
    assert model.output_proj.weight is model.target_embedding.table
    port.package.set_weights(model, random_weights(model.config))
    expected = port.package.Transformer.from_weights(model.config, random_weights(model.config), "float64")
    torch.testing.assert_close(model.eval()(SOURCE, TARGET), expected(SOURCE, TARGET), rtol=0, atol=0)


# --- Positions: rounded once, on the host, and then simply there ---

LENGTHS = (5, 1500)  # the second is longer than what is kept


def position(port, dtype="float32", **overrides):
    return port.package.SinusoidalPosition(tiny_config(**overrides), dtype)


def encoded(length, dtype="float32"):
    """Return the rows of the reference, rounded."""
    rows = ref.sinusoidal_encoding(length, 24)
    return torch.from_numpy(rows).to(getattr(torch, dtype))[None]


class Dtypes(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects the dtypes of all results."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen = {*getattr(self, "seen", ()), getattr(result, "dtype", None)}
        return result


def test_positions_are_not_computed_again(port):
    module = position(port)
    with Dtypes() as dtypes:
        result = module(torch.zeros(1, 5, 24))
    assert torch.float64 not in dtypes.seen
    torch.testing.assert_close(result, encoded(5), rtol=0, atol=0)
    assert module.vectors(5).data_ptr() == module.table.data_ptr()


@pytest.mark.parametrize("length", LENGTHS)
def test_positions_are_exact_in_every_dtype(port, length):
    """Also after a way through a coarser one."""
    module = position(port).to(torch.bfloat16).to(torch.float64)
    torch.testing.assert_close(
        module(torch.zeros(1, length, 24).double()), encoded(length, "float64"), rtol=0, atol=2e-12
    )
    for dtype in ("bfloat16", "float32"):
        x = torch.zeros(1, length, 24, dtype=getattr(torch, dtype))
        torch.testing.assert_close(module.to(x.dtype)(x), encoded(length, dtype), rtol=0, atol=0)


def test_positions_are_compiled_and_exported_for_any_length(port):
    module = position(port)
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    dynamic = {"x": {1: torch.export.Dim("length")}}
    exported = torch.export.export(module, (torch.zeros(1, 7, 24),), dynamic_shapes=dynamic).module()
    for length in LENGTHS:
        x = torch.zeros(1, length, 24)
        for call in (compiled, exported):
            torch.testing.assert_close(call(x), encoded(length), rtol=0, atol=0)
    torch.compiler.reset()


def test_positions_without_data(port):
    """On the meta device, where a tensor of the host would be refused, and in FakeTensorMode."""
    from torch._subclasses import FakeTensorMode

    with torch.device("meta"):
        module = position(port)
    for length in LENGTHS:
        assert module(torch.zeros(1, length, 24, device="meta")).is_meta
    torch.testing.assert_close(module.to_empty(device="cpu")(torch.zeros(1, 5, 24)), encoded(5), rtol=0, atol=0)
    with FakeTensorMode():
        module = position(port)
        assert module(torch.zeros(1, 5, 24)).shape == (1, 5, 24)


def test_positions_are_copied_and_shared_by_threads(port):
    module = position(port)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(torch.zeros(1, 5, 24)), encoded(5), rtol=0, atol=0)
    assert not module.state_dict()  # nothing that is to be learned or stored
    with ThreadPoolExecutor(2) as pool:
        for length, result in zip(
            LENGTHS * 8, pool.map(lambda n: module(torch.zeros(1, n, 24)), LENGTHS * 8), strict=True
        ):
            torch.testing.assert_close(result, encoded(length), rtol=0, atol=0)


def test_print_says_what_a_module_is(port):
    text = str(build(port, "float32", position_offset=2, tie_embeddings="none"))
    for line in (
        "TokenEmbedding(37, 24, multiplier=4.89898)",
        "SinusoidalPosition(24, 'interleaved', 'm', offset=2)",
        "OutputProjection(in_features=24, out_features=41, bias=False)",
        "num_heads=3",
        "activation='relu'",
    ):
        assert line in text
    assert "LearnedPosition(29, 24, offset=0)" in str(build(port, position_encoding="learned"))
