"""The packed weights in PyTorch's searches give correct results, are never stale, and last for one search."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name

import reference_numpy as ref
import transformer_torch
from transformer_bench.workload import DecodeWork
from transformer_torch import fast, onednn

WORK = DecodeWork("tiny", batch=3, source=7, target=6)


@pytest.fixture(scope="module")
def weights():
    return WORK.weights()


@pytest.fixture
def seen(monkeypatch):
    """The matmul functions that the decoding steps use."""
    found = []
    monkeypatch.setattr(onednn, "for_few_rows", lambda *arguments: found.append(inner(*arguments)) or found[-1])
    return found


inner = onednn.for_few_rows


@pytest.mark.parametrize("beam_size", [None, 3])
@pytest.mark.parametrize(
    ("dtype", "large", "packed"),
    [("float32", 1, True), ("float32", 2**20, False), ("float64", 1, False)],
    ids=["oneDNN's layout", "[in, out]", "float64"],
)
def test_search_with_packed_weights_matches_the_reference(weights, beam_size, dtype, large, packed, seen, monkeypatch):
    monkeypatch.setattr(onednn, "LARGE_WEIGHT", large)
    work = DecodeWork("tiny", batch=3, source=7, target=6, beam_size=beam_size)
    model = transformer_torch.Transformer.from_weights(work.config, weights, dtype, precision="highest")
    found = work.search.run(transformer_torch, model, work.source_ids)
    assert len(seen) == 8 * work.config.num_decoder_layers + 1
    assert {multiply.func for multiply in seen} == {onednn._by_onednn if packed else F.linear}
    assert packed or not any(multiply.keywords["weight"].is_contiguous() for multiply in seen)
    expected = work.search.run(ref, ref.Transformer.from_weights(work.config, weights, "float64"), work.source_ids)
    assert np.array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=2e-6 if dtype == "float32" else 1e-13)


def test_modified_weights_are_used_by_the_next_search(weights):
    model = transformer_torch.Transformer.from_weights(WORK.config, weights)
    before = transformer_torch.greedy_search(model, WORK.source_ids, max_length=6)
    for parameter in model.decoder.parameters():
        parameter.data.mul_(1.5)  # autograd's version counter doesn't detect this change
    after = transformer_torch.greedy_search(model, WORK.source_ids, max_length=6)
    fresh = transformer_torch.Transformer.from_weights(WORK.config, model.export_weights())
    assert not np.array_equal(before.scores, after.scores)
    assert np.array_equal(after.scores, transformer_torch.greedy_search(fresh, WORK.source_ids, max_length=6).scores)


def test_search_sets_no_attributes_on_the_model(weights, seen):
    model = transformer_torch.Transformer.from_weights(WORK.config, weights).train()

    def state():
        return [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]

    before, during = state(), []
    transformer_torch.greedy_search(model, WORK.source_ids, max_length=6, on_step=lambda ids: during.append(state()))
    assert seen
    assert [*during, state()] == [before] * (len(during) + 1)


@pytest.mark.parametrize("takes", [True, False])
def test_bfloat16_weights_are_packed_only_if_onednn_supports_them(weights, takes, seen, monkeypatch):
    model = transformer_torch.Transformer.from_weights(WORK.config, weights, "bfloat16")
    expected = transformer_torch.greedy_search(model, WORK.source_ids, max_length=6)
    supported = onednn.takes_bfloat16()
    assert [multiply.func for multiply in seen] == [onednn._by_onednn] * (
        8 * WORK.config.num_decoder_layers + 1
    ) * supported
    seen.clear()
    monkeypatch.setattr(onednn, "takes_bfloat16", lambda: takes and supported)
    found = transformer_torch.greedy_search(model, WORK.source_ids, max_length=6)
    assert bool(seen) == (takes and supported)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=2e-2)


def test_weights_are_not_packed_under_autocast_or_for_many_rows(weights, seen, monkeypatch):
    model = transformer_torch.Transformer.from_weights(WORK.config, weights)
    with torch.autocast("cpu", torch.bfloat16):
        transformer_torch.greedy_search(model, WORK.source_ids, max_length=6)
    assert seen == []
    monkeypatch.setattr(fast, "FEW_ROWS", 2)
    transformer_torch.greedy_search(model, WORK.source_ids, max_length=6)
    assert seen == []
    monkeypatch.setattr(fast, "FEW_ROWS", 3)
    transformer_torch.greedy_search(model, WORK.source_ids, max_length=6)
    assert seen != []


def test_search_supports_decoders_with_third_party_layers(weights):
    class Other(torch.nn.Module):
        """A module without a weight that could be packed, such as a quantized layer."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model = transformer_torch.Transformer.from_weights(WORK.config, weights)
    expected = transformer_torch.greedy_search(model, WORK.source_ids, max_length=6).ids
    feed_forward = model.decoder.layers[0].feed_forward
    feed_forward.inner_proj = Other(feed_forward.inner_proj)
    torch.nn.utils.parametrizations.weight_norm(feed_forward.output_proj)
    found = transformer_torch.greedy_search(model, WORK.source_ids, max_length=6)
    assert np.array_equal(found.ids, expected)
