"""A PyTorch model as a module: state dict, devices and dtypes, compilation, copies, and modes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config
from native_models import ONE_LAYER, SOURCE, TARGET, assert_close, build


@pytest.mark.only("torch")
def test_torch_state_dict_round_trips(port, tmp_path):
    import torch

    model = build(port, tie_embeddings="target_output", output_bias=True, position_encoding="learned")
    fresh = port.package.Transformer(model.config, dtype="float64").eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    assert_same_bits(fresh.export_weights(), model.export_weights())
    torch.testing.assert_close(fresh(SOURCE, TARGET), model(SOURCE, TARGET), rtol=0, atol=0)


@pytest.mark.only("torch")
def test_torch_to_converts_the_dtype(port):
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
def test_torch_compiles_without_graph_breaks(port):
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
def test_torch_deepcopy_preserves_ties_and_weights(port):
    model = build(port)
    twin = copy.deepcopy(model)
    assert twin.source_embedding is twin.target_embedding
    assert_same_bits(twin.export_weights(), model.export_weights())
    port.package.set_weights(twin, random_weights(twin.config, seed=1))
    kept = {name: array.astype("float64") for name, array in random_weights(model.config).items()}
    assert_same_bits(model.export_weights(), kept)


@pytest.mark.only("torch")
def test_torch_search_preserves_training_modes(port):
    """A model in training mode with a frozen part is searched without dropout and keeps its modes."""
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
