"""What users of PyTorch do with any module works with this one."""

from __future__ import annotations

import copy
import pickle

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
