"""The second layout of weights in PyTorch's searches: the same result, never out of date, gone afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference_numpy as ref
import transformer_torch
from transformer_parity.bench.workload import DecodeWork
from transformer_torch import layers
from transformer_torch.layers import laid_out_for_few_rows

WORK = DecodeWork("tiny", batch=3, source=7, target=6)


@pytest.fixture(scope="module")
def weights():
    return WORK.weights()


def relaid(model):
    return [module for module in model.modules() if getattr(module, "relaid", None) is not None]


@pytest.fixture
def seen(monkeypatch):
    """The layouts that steps multiply by."""
    found = []
    monkeypatch.setattr(layers, "_relaid", lambda *arguments: found.append(inner(*arguments)) or found[-1])
    return found


inner = layers._relaid


@pytest.mark.parametrize("beam_size", [None, 3])
@pytest.mark.parametrize(
    ("dtype", "large", "packed"),
    [("float32", 1, True), ("float32", 2**20, False), ("float64", 1, False)],
    ids=["oneDNN's layout", "[in, out]", "float64"],
)
def test_the_result_is_the_references(weights, beam_size, dtype, large, packed, seen, monkeypatch):
    monkeypatch.setattr(layers, "LARGE", large)
    work = DecodeWork("tiny", batch=3, source=7, target=6, beam_size=beam_size)
    model = transformer_torch.Transformer.from_weights(work.config, weights, dtype)
    found = work.search.search(transformer_torch, model, work.source_ids)
    assert len(seen) == 8 * work.config.num_decoder_layers + 1
    assert [weight.is_mkldnn for weight in seen] == [packed] * len(seen)
    assert packed or not any(weight.is_contiguous() for weight in seen)
    assert relaid(model) == []
    expected = work.search.search(ref, ref.Transformer.from_weights(work.config, weights, "float64"), work.source_ids)
    assert np.array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=2e-6 if dtype == "float32" else 1e-13)


def test_weights_that_changed_are_seen(weights):
    model = transformer_torch.Transformer.from_weights(WORK.config, weights)
    before = transformer_torch.greedy_search(model, WORK.source_ids, max_length=6)
    for parameter in model.decoder.parameters():
        parameter.data.mul_(1.5)  # which autograd's version counter does not see
    after = transformer_torch.greedy_search(model, WORK.source_ids, max_length=6)
    fresh = transformer_torch.Transformer.from_weights(WORK.config, model.export_weights())
    assert not np.array_equal(before.scores, after.scores)
    assert np.array_equal(after.scores, transformer_torch.greedy_search(fresh, WORK.source_ids, max_length=6).scores)


def test_they_are_gone_after_an_error(weights):
    model = transformer_torch.Transformer.from_weights(WORK.config, weights)
    during = []

    def stop(ids):
        during.extend(relaid(model))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transformer_torch.greedy_search(model, WORK.source_ids, max_length=6, on_step=stop)
    assert during
    assert relaid(model) == []


def test_what_blas_lays_out_itself_is_left_alone(weights):
    linear = layers.Linear(4, 3, bias=True, dtype="bfloat16")
    with laid_out_for_few_rows({linear: linear.weight}, 1):
        assert linear.relaid is None
        assert linear(torch.ones(2, 4, dtype=torch.bfloat16)).shape == (2, 3)


def test_autocast_and_many_rows_keep_the_usual_layout():
    linear = layers.Linear(1024, 1024, bias=True)
    with torch.autocast("cpu", torch.bfloat16), laid_out_for_few_rows({linear: linear.weight}, 1):
        assert linear.relaid is None
        assert linear(torch.ones(1, 1024, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with laid_out_for_few_rows({linear: linear.weight}, layers.FEW + 1):
        assert linear.relaid is None
    with laid_out_for_few_rows({linear: linear.weight}, layers.FEW):
        assert linear.relaid.is_mkldnn


def test_a_decoder_with_layers_of_other_makers_still_searches(weights):
    class Other(torch.nn.Module):
        """Has no weight that anybody could lay out, as a quantised layer has none."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model = transformer_torch.Transformer.from_weights(WORK.config, weights)
    expected = transformer_torch.greedy_search(model, WORK.source_ids, max_length=6).ids
    feed_forward = model.decoder.layers[0].feed_forward
    feed_forward.inner_proj = Other(feed_forward.inner_proj)
    assert np.array_equal(transformer_torch.greedy_search(model, WORK.source_ids, max_length=6).ids, expected)
