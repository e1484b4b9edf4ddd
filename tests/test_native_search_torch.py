"""A PyTorch search doesn't interfere with other users of its model: gradients, hooks, threads, and compiled parts."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from modules_torch import compiled, modes
from native_models import BATCH, LABELS, SETTINGS, SOURCE, TARGET, build
from torch import nn
from torch.nn.utils import prune

pytestmark = pytest.mark.only("torch")


# --- A search doesn't interfere with other users of its model. ---


@pytest.mark.parametrize("search", ["greedy_search", "beam_search"])
def test_search_callback_can_compute_gradients(port, search):
    """The memory layouts and the inference mode of a search don't affect its callbacks."""
    model, found = build(port, "float32"), []

    def differentiate(ids):
        model.zero_grad()
        model(SOURCE, TARGET).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])

    differentiate(None)
    getattr(port.package, search)(model, SOURCE, max_length=4, on_step=differentiate)
    assert len(found) > 2
    for during in found[1:]:
        assert all(map(torch.equal, during, found[0]))


def test_concurrent_searches_and_training_do_not_interfere(port):
    """Threads that share a model get the same results as one thread, and the model remains in training mode."""
    model = build(port, "float32").train()
    expected, modes = port.package.beam_search(model, SOURCE, max_length=12), []

    def look(ids):
        modes.append(all(module.training for module in model.modules()))
        model(SOURCE, TARGET).mean().backward()

    with ThreadPoolExecutor(3) as threads:
        searches = [
            threads.submit(port.package.beam_search, model, SOURCE, max_length=12, on_step=look) for _ in range(6)
        ]
    for search in searches:
        np.testing.assert_array_equal(search.result().ids, expected.ids)
        np.testing.assert_array_equal(search.result().scores, expected.scores)
    assert modes
    assert all(modes)


def test_search_does_not_copy_its_tokens_to_the_host(port, monkeypatch):
    """A search doesn't validate its own tokens, because that would require a copy to the host in each step."""
    runtime, read = port.package.runtime, []
    check = runtime.check_ids
    monkeypatch.setattr(
        runtime, "check_ids", lambda name, *rest: read.append((name, rest[-1] is None)) or check(name, *rest)
    )
    model = build(port)
    port.package.greedy_search(model, SOURCE, max_length=3, min_length=3)
    assert read.count(("target_ids", True)) == 3
    assert ("target_ids", False) not in read
    model.decode_step(torch.tensor([1, 1]), model.init_cache(SOURCE, 2))
    assert ("target_ids", False) in read


def test_forward_hooks_fire_in_a_search(port):
    model, fired = build(port), set()
    for name, module in [*model.decoder.named_modules()][1:]:
        module.register_forward_hook(lambda module, inputs, output, name=name: fired.add(name))
    port.package.greedy_search(model, SOURCE, max_length=2)
    assert {"layers.0", "layers.0.self_attention.query_proj", "layers.0.feed_forward.output_proj"} <= fired


def dropped_out(port):
    """Return a model in training mode and one with the same weights in inference mode."""
    dropout = {"embedding": 0.5, "residual": 0.5, "attention": 0.5}
    return build(port, dropout=dropout).train(), build(port, dropout=dropout)


def patched(layer):
    """Replace a layer's ``forward`` method with a wrapper, as tools do."""

    def forward(original, *args):
        layer.was_called = True
        return original(*args)

    layer.forward, layer.was_called = functools.partial(forward, layer.forward), False


CHANGES = {
    "a compiled layer": lambda layers: layers.append(torch.compile(layers.pop(0), backend="eager")),
    "a compiled attention": lambda layers: compiled(layers[0], "self_attention"),
    "a patched layer": lambda layers: patched(layers[0]),
    "a patched projection": lambda layers: patched(layers[0].feed_forward.inner_proj),
    "a patched dropout": lambda layers: patched(layers[0].dropout),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_search_runs_wrapped_layers_in_inference_mode(port, change, part):
    """A search also runs compiled and patched layers in inference mode, and restores their modes afterwards."""
    model, plain = dropped_out(port)
    CHANGES[change](getattr(model, part).layers)
    before = modes(model)
    found, expected = (port.package.beam_search(each, SOURCE, max_length=6) for each in (model, plain))
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-12)
    assert modes(model) == before
    assert all(getattr(module, "was_called", True) for module in model.modules())
    torch.compiler.reset()


def test_search_with_a_compiled_model_matches_the_plain_model(port):
    model, plain = dropped_out(port)
    found = port.package.greedy_search(torch.compile(model, backend="eager"), SOURCE, max_length=6)
    np.testing.assert_array_equal(found.ids, port.package.greedy_search(plain, SOURCE, max_length=6).ids)


def test_search_ignores_a_child_module_set_to_none(port):
    """PyTorch keeps the attribute's name, with None instead of a module."""
    model, plain = build(port), build(port)
    model.encoder.register_module("adapter", None)
    found, expected = (port.package.greedy_search(each, SOURCE, max_length=6) for each in (model, plain))
    np.testing.assert_array_equal(found.ids, expected.ids)


# --- Hooks, replaced methods, and custom modules ---


def test_hooks_and_custom_layers_of_a_search_store_values_in_the_model(port):
    """A search with such modules doesn't use copies of the modules."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model, found = build(port), []
    names = {module: name for name, module in model.named_modules()}
    hook = model.output_proj.register_forward_hook(lambda module, *rest: found.append(names[module]))
    port.package.greedy_search(model, SOURCE, max_length=3, min_length=3)
    assert found == ["output_proj"] * 3
    hook.remove()
    feed_forward = model.decoder.layers[0].feed_forward
    feed_forward.inner_proj = Counting(24, len(feed_forward.inner_proj.weight), dtype=torch.float64)
    port.package.greedy_search(model, SOURCE, max_length=3, min_length=3)
    assert feed_forward.inner_proj.calls == 3


def test_search_runs_a_replaced_encode_in_inference_mode(port):
    model, plain = dropped_out(port)
    model.encode = functools.partial(model.encode)
    found, expected = (port.package.greedy_search(each, SOURCE, max_length=6) for each in (model, plain))
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-12)
    assert model.training


def test_search_uses_new_weights_of_a_pruned_layer(port):
    model, layer = build(port), "decoder.layers.0.feed_forward.inner_proj"
    prune.l1_unstructured(model.get_submodule(layer), "weight", 0.3)
    with torch.no_grad():
        model.get_submodule(layer).weight_orig.mul_(-3)
    found = port.package.greedy_search(model, SOURCE, max_length=4)
    expected = port.package.score(model, SOURCE, found.ids).sequences
    np.testing.assert_allclose(found.scores, expected.detach().numpy(), rtol=1e-12)


class Flipped(nn.Dropout):
    """A module that replaces dropout and also acts in inference mode."""

    def forward(self, x):
        return x.flip(-1)


@pytest.mark.parametrize("name", ["dropout", "decoder.layers.0.self_attention.dropout"])
def test_replaced_dropout_is_used_in_forward_passes_and_searches(port, name):
    model, plain = build(port), build(port, fast=False)
    for each in (model, plain):
        each.set_submodule(name, Flipped(0.0))
    torch.testing.assert_close(model(SOURCE, TARGET), plain(SOURCE, TARGET), rtol=0, atol=1e-12)
    step, _ = model.decode_step(TARGET, model.init_cache(SOURCE, 4))
    torch.testing.assert_close(step, model(SOURCE, TARGET), rtol=0, atol=1e-12)


def test_hooks_of_attention_dropout_fire(port):
    model, found = build(port), []
    model.encoder.layers[0].self_attention.dropout.register_forward_hook(lambda *args: found.append(args))
    model(SOURCE, TARGET)
    assert len(found) == 1


@pytest.mark.parametrize("part", ["", "decoder"])
def test_search_warns_about_hooks_that_it_ignores(port, part):
    model = build(port)
    model.get_submodule(part).register_forward_hook(lambda *args: None)
    with pytest.warns(UserWarning, match="searches ignore hooks .* of the model and its decoder; hook or replace"):
        port.package.greedy_search(model, SOURCE, max_length=2)


@pytest.mark.parametrize("search", ["greedy_search", "beam_search", "sample"])
def test_search_rejects_nan(port, search):
    model = build(port)
    with torch.no_grad():
        model.source_embedding.weight[5] = float("nan")
    with pytest.raises(ValueError, match="score of each sequence must be finite: got"):
        getattr(port.package, search)(model, SOURCE, max_length=2)


class Wrapper(torch.nn.Module):
    """A wrapper whose ``forward`` method accepts only IDs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, source_ids, target_ids):
        return self.model(source_ids, target_ids)


def hooked(model):
    wrapper = Wrapper(model)
    wrapper.register_forward_hook(lambda *args: None)
    return wrapper


def hooked_and_compiled(model):
    compiled = torch.compile(model, backend="eager")
    compiled.register_forward_pre_hook(lambda *args: None)
    return compiled


def with_decode_step(model):
    return type("Decoding", (Wrapper,), {"decode_step": lambda self, *args: self.model.decode_step(*args)})(model)


@pytest.mark.parametrize("change", [hooked, hooked_and_compiled, with_decode_step])
def test_search_warns_about_code_of_wrappers_that_it_ignores(port, change):
    model, message = change(build(port)), "searches ignore hooks and decode_step methods of modules that wrap the model"
    with pytest.raises(UserWarning, match=message):  # an error, so that the search doesn't compile the model
        port.package.greedy_search(model, SOURCE, max_length=2)


def test_wrapper_whose_call_accepts_only_ids_can_be_scored_and_trained(port):
    package, wrapper, model = port.package, Wrapper(build(port)), build(port)
    package.greedy_search(wrapper, SOURCE, max_length=2)  # without a warning
    found, expected = (package.score(x, SOURCE, LABELS).tokens for x in (wrapper, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found, expected = (package.Trainer(x, SETTINGS).train_step(*BATCH).loss for x in (wrapper, model))
    assert found == expected


def without_self_attention(model):
    model.decoder.layers[1].self_attention = model.decoder.layers[1].self_attention_norm = None


def with_sparse_weights(model):
    for layer in model.decoder.layers:
        linear = layer.feed_forward.inner_proj
        linear.weight = torch.nn.Parameter(linear.weight.detach().to_sparse_csr(), requires_grad=False)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("change", [without_self_attention, with_sparse_weights])
def test_search_with_changed_layers_matches_forward_passes(port, change):
    model = build(port, "float32", num_decoder_layers=2)
    change(model)
    found = port.package.greedy_search(model, SOURCE, max_length=4)
    with torch.no_grad():
        scores = port.package.score(model, SOURCE, found.ids).sequences
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)


def test_search_rejects_logits_of_a_different_vocabulary(port):
    model = build(port, tie_embeddings="none")
    size = model.config.target_vocab_size
    model.output_proj = torch.nn.Linear(model.config.d_model, size + 1).double()
    with pytest.raises(ValueError, match=rf"logits must have shape \(2, 1, {size}\): got \(2, 1, {size + 1}\)"):
        port.package.greedy_search(model, SOURCE, max_length=1)
