"""PyTorch: decoding steps compiled to one graph, searches with compiled models, and steps with multiple tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from modules_torch import with_adapters
from native_models import SOURCE, TARGET, build

pytestmark = pytest.mark.only("torch")


@pytest.fixture
def graphs():
    """The graphs that torch.compile passes to its backend, which appends them to this list."""
    torch.compiler.reset()
    found = []
    yield found
    torch.compiler.reset()


def backend(found):
    return lambda graph, _: found.append(graph) or graph.forward


def test_decode_step_compiles_to_one_graph_for_all_lengths(port, graphs):
    """All layers share one length, which the compiler treats as a variable from the second step onward."""
    model = build(port, num_decoder_layers=3)
    step = torch.compile(model.decode_step, fullgraph=True, backend=backend(graphs))
    found, expected = model.init_cache(SOURCE, 20), model.init_cache(SOURCE, 20)
    for n in range(20):
        tokens = torch.tensor([1 + n, 3])
        (logits, found), (right, expected) = step(tokens, found), model.decode_step(tokens, expected)
        torch.testing.assert_close(logits, right, rtol=1e-12, atol=1e-12)
        assert found.length == n + 1
        assert len(graphs) <= 1 + (n > 0) + (n == 19)  # three kinds: first step, full cache, others
    with pytest.raises(ValueError, match="the cache is full: all 20 positions are in use"):
        model.decode_step(torch.tensor([1, 1]), expected)


@pytest.mark.parametrize("search", ["greedy_search", "beam_search"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["the model", "a wrapper"])
def test_search_uses_the_compiled_model(port, graphs, search, wrapped):
    model = build(port)
    options = {"max_length": 12, "min_length": 12}
    expected = getattr(port.package, search)(model, SOURCE, **options)
    outer = torch.compile(torch.nn.DataParallel(model) if wrapped else model, backend=backend(graphs))
    found = getattr(port.package, search)(outer, SOURCE, **options)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-12)
    assert 1 <= len(graphs) <= 3


def test_search_runs_compiled_layers(port, graphs):
    model = build(port)
    expected = port.package.greedy_search(model, SOURCE, max_length=6)
    model.decoder.layers[0].feed_forward.compile(backend=backend(graphs))
    found = port.package.greedy_search(model.train(), SOURCE, max_length=6)
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert graphs
    assert model.training


def test_search_runs_a_replaced_decode_step(port, graphs):
    model = build(port)
    expected = port.package.greedy_search(model, SOURCE, max_length=6)
    model.decode_step = torch.compile(model.decode_step, backend=backend(graphs))
    np.testing.assert_array_equal(port.package.greedy_search(model, SOURCE, max_length=6).ids, expected.ids)
    assert graphs


def test_search_warns_if_only_the_call_is_compiled(port, graphs):
    model = build(port)
    expected = port.package.greedy_search(model, SOURCE, max_length=6)
    model.compile(backend=backend(graphs))
    with pytest.warns(UserWarning, match=r"searches ignore model.compile\(\); pass torch.compile"):
        found = port.package.greedy_search(model, SOURCE, max_length=6)
    np.testing.assert_array_equal(found.ids, expected.ids)


# --- Multiple tokens per step ---


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_decode_step_accepts_multiple_tokens(port, dtype, beam_size):
    """Decoding a prefix, then one token, then two tokens matches a forward pass, even with padding in the target."""
    model = build(port, dtype, num_decoder_layers=2)
    rng = np.random.default_rng(0)
    target = rng.integers(3, 37, (2 * beam_size, 7))
    target[:, 0] = 1
    target[1, 2] = model.config.pad_id
    expected = model(SOURCE.repeat(beam_size, 0), target)
    cache = model.init_cache(SOURCE, 7, beam_size)
    found = []
    for tokens in (target[:, :4], torch.tensor(target[:, 4]), target[:, 5:]):
        logits, cache = model.decode_step(tokens, cache)
        assert logits.shape == (*tokens.shape, 37)
        found.append(logits if logits.ndim == 3 else logits[:, None])
    assert cache.length == 7
    tolerance = 1e-12 if dtype == "float64" else 2e-5
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=tolerance, atol=tolerance)


def test_first_position_of_a_prefix_can_be_padding(port):
    model = build(port, bos_id=0)
    target = np.array([[0, 5, 6], [0, 7, 0]])
    logits, cache = model.decode_step(target, model.init_cache(SOURCE, 4))
    torch.testing.assert_close(logits, model(SOURCE, target), rtol=1e-12, atol=1e-12)
    assert cache.self_mask[:, 0, 0].tolist() == [[True, True, True, False], [True, True, False, False]]


def test_prefix_beyond_the_cache_capacity_is_rejected(port):
    model = build(port)
    cache = model.init_cache(SOURCE, 3)
    _, cache = model.decode_step(TARGET[:, :1], cache)
    for tokens, message in (
        (TARGET, r"the cache must have room for 4 positions in total \(1 are in use\): got 3"),
        (TARGET[:1], r"target_ids must have shape \(2,\): got \(1,\)"),
        (TARGET[:, :0], "target_ids must contain at least one token"),
        (TARGET[None], r"target_ids must have shape \[batch, length\]: got \(1, 2, 3\)"),
        (TARGET + 40, "target_ids must"),
    ):
        with pytest.raises(ValueError, match=message):
            model.decode_step(tokens, cache)
    assert cache.length == 1


# --- Quantized weights and other tensor subclasses ---


def test_search_supports_half_precision(port):
    model, expected = build(port, "float32").half(), build(port, "float32")
    assert model(SOURCE, TARGET).dtype == torch.float16
    for search in (port.package.greedy_search, port.package.beam_search):
        found, right = search(model, SOURCE, max_length=4), search(expected, SOURCE, max_length=4)
        np.testing.assert_allclose(found.scores, right.scores, rtol=0.02)


class Scaled(torch.Tensor):
    """A matrix that only supports multiplication, like torchao's quantized tensors."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            x, weight, *bias = args
            return torch.nn.functional.linear(x, 2.0 * weight.as_subclass(torch.Tensor), *bias)
        name = getattr(function, "__name__", "")
        assert not name.startswith(("t", "contiguous", "_mkl", "_reorder")) or name == "type", name
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_search_does_not_change_layout_of_quantized_weights(port, dtype):
    """A search changes the memory layout only of plain tensors."""
    model, expected = build(port, dtype), build(port, dtype)
    for layer in (model.decoder.layers[0].feed_forward.inner_proj, model.decoder.layers[0].self_attention.query_proj):
        layer.weight = torch.nn.Parameter((layer.weight.detach() / 2).as_subclass(Scaled), requires_grad=False)
    found = port.package.greedy_search(model, SOURCE, max_length=5)
    np.testing.assert_array_equal(found.ids, port.package.greedy_search(expected, SOURCE, max_length=5).ids)


def test_search_supports_wrapped_models(port):
    model = build(port).train()
    with_adapters(model)
    expected = port.package.greedy_search(model, SOURCE, max_length=5)
    wrapped = torch.nn.DataParallel(torch.nn.ModuleDict({"model": model}))
    for search, right in ((port.package.greedy_search, expected), (port.package.beam_search, None)):
        found = search(wrapped, SOURCE, max_length=5)
        right = right or search(model, SOURCE, max_length=5)
        np.testing.assert_array_equal(found.ids, right.ids)
    assert model.training
