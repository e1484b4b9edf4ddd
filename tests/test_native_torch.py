"""What users of PyTorch do with any module works with this one."""

from __future__ import annotations

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiers
import torch
from conftest import assert_same_bits, random_weights, tiny_config
from test_native import BATCH, SETTINGS, SOURCE, TARGET, assert_close, build, losses, run_alone

import reference_numpy as ref
import transformer_torch
from reference_numpy import TrainingConfig, parameter_shapes

pytestmark = pytest.mark.only("torch")


def modes(model):
    return [module.training for module in model.modules()]


TIES = {
    "as built": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "to": lambda model: model.to(torch.float32).to(torch.float64),
    "to_empty": lambda model: _refilled(model.to_empty(device="cpu")),
}


def _refilled(model):
    """Return a model that was left without values, with those that it had."""
    transformer_torch.set_weights(model, random_weights(model.config))
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


@pytest.mark.parametrize("way", ["as built", "deepcopy", "pickle"])
@pytest.mark.parametrize("tie", ["target_output", "all"])
def test_a_state_dict_is_assigned_to_a_model_on_the_meta_device(port, tie, way):
    """The tie and the positions, which no state dict has, are then as they were."""
    expected = build(port, tie_embeddings=tie)
    with torch.device("meta"):
        model = port.package.Transformer(expected.config, "float64")
    model = TIES[way](model)
    torch.nn.ModuleList([model]).load_state_dict(torch.nn.ModuleList([expected]).state_dict(), assign=True)
    assert model.output_proj.weight is model.target_embedding.table
    assert sum(p.numel() for p in model.parameters()) == ref.count_parameters(model.config)
    expected = build(port, tie_embeddings=tie)  # whose parameters are its own
    assert losses(port.package.Trainer(model, SETTINGS)) == losses(port.package.Trainer(expected, SETTINGS))
    assert_same_bits(model.export_weights(), expected.export_weights())


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_that_has_a_tied_table_once(port, assign):
    model, expected = (build(port, tie_embeddings="target_output") for _ in range(2))
    torch.nn.init.zeros_(model.output_proj.weight)
    state = expected.state_dict()
    del state["output_proj.weight"]
    names = list(state)
    model.load_state_dict(state, assign=assign)
    assert list(state) == names
    assert model.output_proj.weight is model.target_embedding.table
    assert_same_bits(model.export_weights(), expected.export_weights())
    del state["target_embedding.table"]
    with pytest.raises(RuntimeError, match=r"Missing key.*target_embedding"):
        model.load_state_dict(state)


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


def test_positions_are_copied(port):
    module = position(port)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(torch.zeros(1, 5, 24)), encoded(5), rtol=0, atol=0)
    assert not module.state_dict()  # nothing that is to be learned or stored


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


# --- Training ---


def test_forward_hooks_fire_in_training(port):
    model, called = build(port), []
    for name in ("", "encoder", "decoder.layers.0.cross_attention"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    trainer = port.package.Trainer(model, SETTINGS)
    for run in (trainer.train_step, trainer.evaluate, lambda *batch: port.package.gradients(model, *batch)):
        called.clear()
        run(*BATCH)
        assert called == ["encoder", "decoder.layers.0.cross_attention", ""]


@pytest.fixture
def process_group(tmp_path):
    """A group of one process."""
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2, "clip_norm": 0.1}])
def test_distributed_data_parallel(port, process_group, settings):
    """Around the model and what trains it: its hooks reduce each gradient."""
    from torch.nn.parallel import DistributedDataParallel

    settings = TrainingConfig(**{**SETTINGS.to_dict(), **settings})
    expected = port.package.Trainer(build(port), settings)
    wrapped, reduced = DistributedDataParallel(build(port)), []

    def reduce(_, bucket):
        reduced.append(bucket)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, reduce)
    trainer = port.package.Trainer(wrapped, settings)
    assert losses(trainer) == losses(expected)
    assert len(reduced) >= 3 * settings.accumulation_steps
    assert_same_bits(wrapped.module.export_weights(), expected.model.export_weights())
    assert_same_bits(trainer.export_state().first_moment, expected.export_state().first_moment)
    assert float(trainer.evaluate(*BATCH)[0]) == float(expected.evaluate(*BATCH)[0])
    found = port.package.gradients(wrapped, *BATCH)
    assert_same_bits(found.parameters, port.package.gradients(expected.model, *BATCH).parameters)
    trainer.load_state(expected.export_state())
    assert losses(trainer) == losses(expected)


@pytest.mark.extended("plans")
def test_distributed_data_parallel_of_two_processes(port, tmp_path):
    """Each with rows of its own; the gradient is the mean of theirs, in a loop with our loss and in a trainer."""
    from parallel_torch import run

    from transformer_parity.transformer.distributed.cases import probes

    case = probes()["plain"]
    model = port.package.Transformer.from_weights(case.config, case.weights(), "float64")
    alone = [port.package.gradients(model, *(ids[rank::2] for ids in case.batch(0))).parameters for rank in range(2)]
    ((first,), (second,)) = run(tmp_path, 2, [("their_own_copies", {})])
    for found in (first, second):
        for way in ("loop", "trainer"):
            for name, gradient in found[way].items():
                assert_close(gradient, (alone[0][name] + alone[1][name]) / 2)
    assert_same_bits(first["weights"], second["weights"])


def test_a_compiled_model_is_trained(port):
    expected = port.package.Trainer(build(port), SETTINGS)
    compiled = torch.compile(build(port), backend="eager")
    trainer = port.package.Trainer(compiled, SETTINGS)
    np.testing.assert_allclose(losses(trainer), losses(expected), rtol=1e-12)
    np.testing.assert_allclose(float(trainer.evaluate(*BATCH)[0]), float(expected.evaluate(*BATCH)[0]), rtol=1e-12)
    torch.compiler.reset()


@pytest.mark.parametrize("part", ["self_attention", "self_attention_norm", "cross_attention", "feed_forward"])
def test_a_compiled_part_of_a_layer(port, part):
    """It has no truth value."""
    model, plain = build(port), build(port)
    compiled(model.decoder.layers[0], part)
    with torch.no_grad():  # torch warns of itself otherwise
        torch.testing.assert_close(model(SOURCE, TARGET), plain(SOURCE, TARGET), rtol=1e-12, atol=1e-12)
    torch.compiler.reset()


def test_frozen_parts_stay_as_they_are(port):
    model = build(port)
    before = model.export_weights()
    model.encoder.requires_grad_(False)
    trainer = port.package.Trainer(model, SETTINGS)
    losses(trainer)
    after, state = model.export_weights(), trainer.export_state()
    assert list(state.first_moment) == list(state.second_moment) == list(parameter_shapes(model.config))
    for name in before:
        moved = not name.startswith("encoder.")
        assert np.array_equal(after[name], before[name]) != moved, name
        assert state.first_moment[name].any() == state.second_moment[name].any() == moved, name


def test_gradients_say_what_is_frozen(port):
    """Taps have theirs all the same, also where nothing before them is trained."""
    model = build(port)
    expected = port.package.gradients(model, *BATCH)
    model.encoder.requires_grad_(False)
    model.source_embedding.requires_grad_(False)
    found = port.package.gradients(model, *BATCH)
    assert expected.frozen == ()
    assert found.frozen == tuple(name for name in expected.parameters if name.startswith(("encoder", "source")))
    assert [*found.parameters] == [name for name in expected.parameters if name not in found.frozen]
    assert [*found.taps] == [*expected.taps]
    for name, gradient in {**found.parameters, **found.taps}.items():
        assert_close(gradient, {**expected.parameters, **expected.taps}[name])


def test_what_thaws_goes_on_as_if_it_had_been_resumed(port):
    """One number of steps for all is what a state has: the bias of the moments is corrected by it."""
    model = build(port)
    model.encoder.requires_grad_(False)
    trainer = port.package.Trainer(model, SETTINGS)
    losses(trainer)
    resumed = port.package.Trainer(build(port), SETTINGS)
    port.package.set_weights(resumed.model, model.export_weights())
    resumed.load_state(trainer.export_state())
    model.requires_grad_()
    assert losses(trainer) == losses(resumed)
    assert_same_bits(model.export_weights(), resumed.model.export_weights())


def test_groups_of_parameters_added_to_a_trainer(port):
    """They are trained too, and one that is frozen stays as it is."""
    trainer, expected = (port.package.Trainer(build(port), SETTINGS) for _ in range(2))
    added, frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    trainer.optimizer.add_param_group({"params": [added]})
    trainer.optimizer.add_param_group({"params": frozen})
    added.grad = torch.ones(3)
    trainer.optimizer.zero_grad = lambda: trainer.model.zero_grad()  # what is added takes no part in the loss
    assert losses(trainer) == losses(expected)
    assert_same_bits(trainer.model.export_weights(), expected.model.export_weights())
    assert trainer.optimizer.state[added]["step"] == trainer.optimizer.state[frozen]["step"] == 3
    assert (added < 1.0).all()
    assert (frozen == 1.0).all()


def test_the_callers_autocast_holds_in_training(port):
    def first(mixed, autocast):
        trainer = port.package.Trainer(build(port, dtype="float32"), TrainingConfig(mixed_bfloat16=mixed))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return losses(trainer, 1)

    assert first(mixed=False, autocast=True) == first(mixed=True, autocast=False) != first(mixed=False, autocast=False)


def test_gradients_and_evaluation_leave_modes_alone(port):
    model = build(port)
    trainer = port.package.Trainer(model, SETTINGS)
    model.train()
    model.encoder.eval()
    before = modes(model)
    port.package.gradients(model, *BATCH)
    trainer.evaluate(*BATCH)
    assert modes(model) == before
    assert len(set(before)) == 2


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam"])
def test_any_optimizer_with_parameter_groups(port, name):
    """No decay for norms and biases; our loss, backward from the logits of the model in training mode."""
    model = build(port).train()
    wide = [p for p in model.parameters() if p.ndim > 1]
    narrow = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": wide, "weight_decay": 0.01}, {"params": narrow, "lr": 0.001, "weight_decay": 0.0}]
    optimizer = getattr(torch.optim, name)(groups, lr=0.005)
    source, target, labels = map(torch.tensor, BATCH)

    def loss():
        total, tokens = port.package.cross_entropy(model(source, target), labels, model.config)
        return total / tokens

    before = loss_without_dropout(model, loss)
    for _ in range(10):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss_without_dropout(model, loss) < 0.9 * before


def loss_without_dropout(model, loss):
    """Return a loss that no random mask moves."""
    model.eval()
    with torch.no_grad():
        found = loss().item()
    model.train()
    return found


def test_a_parametrized_layer(port):
    """The weight is computed from another parameter, through which the gradient passes."""
    from torch.nn.utils import parametrize

    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2.0 * weight

        def right_inverse(self, weight):
            return 0.5 * weight

    model, plain = build(port), build(port)
    layer = model.encoder.layers[0].feed_forward.inner_proj
    parametrize.register_parametrization(layer, "weight", Doubled())
    source, target = map(torch.tensor, (SOURCE, TARGET))
    for each in (model, plain):
        each(source, target).square().sum().backward()
    torch.testing.assert_close(model(source, target), plain(source, target), rtol=1e-12, atol=1e-12)
    found = layer.parametrizations.weight.original.grad
    torch.testing.assert_close(found, 2.0 * plain.encoder.layers[0].feed_forward.inner_proj.weight.grad)


class Tripled(torch.nn.Module):
    def forward(self, weight):
        return 3.0 * weight

    def right_inverse(self, weight):
        return weight / 3.0


def test_a_parametrized_layer_in_a_trainer(port):
    """Gradients are those of the weight that is computed; what would be lost silently is refused."""
    from torch.nn.utils import parametrize

    model, plain = build(port), build(port)
    layer = model.encoder.layers[0].feed_forward.inner_proj
    parametrize.register_parametrization(layer, "weight", Tripled())
    found, expected = (port.package.gradients(each, *BATCH) for each in (model, plain))
    assert [*found.parameters] == [*expected.parameters]
    for name, gradient in found.parameters.items():
        assert_close(gradient, expected.parameters[name])
    trainer = port.package.Trainer(model, SETTINGS)
    before = model.export_weights()
    losses(trainer)
    name = "encoder.layers.0.feed_forward.inner_proj.kernel"
    assert not np.array_equal(model.export_weights()[name], before[name])
    state = port.package.Trainer(plain, SETTINGS).export_state()
    for refused in (
        lambda: port.package.set_weights(model, before),
        trainer.export_state,
        lambda: trainer.load_state(state),
    ):
        with pytest.raises(ValueError, match=f"{name} is not a parameter of its own"):
            refused()


def test_gradients_of_a_pruned_layer(port):
    """Its weight is computed before each call, from another parameter and a mask."""
    from torch.nn.utils import prune

    model, plain = build(port), build(port)
    name = "encoder.layers.0.feed_forward.inner_proj"
    prune.l1_unstructured(model.get_submodule(name), "weight", 0.5)
    with torch.no_grad():
        plain.get_submodule(name).weight.copy_(model.get_submodule(name).weight)
    found, expected = (port.package.gradients(each, *BATCH) for each in (model, plain))
    assert_same_bits(found.parameters, expected.parameters)
    trainer = port.package.Trainer(model, SETTINGS)
    losses(trainer)
    prune.remove(model.get_submodule(name), "weight")
    kernel = model.export_weights()[f"{name}.kernel"]
    assert (kernel == 0).sum() == kernel.size // 2


# --- A search leaves its model to others. ---


@pytest.mark.parametrize("search", ["greedy_search", "beam_search"])
def test_gradients_while_a_search_shows_its_steps(port, search):
    """The layouts and the inference mode of a search are its own."""
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


def test_two_searches_and_a_trainer_at_a_time(port):
    """Threads that share a model find what one would, and it stays in training mode."""
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


def test_tokens_of_a_search_are_not_read_back(port, monkeypatch):
    """They come from the search itself; those of a caller are read in each step."""
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
    for name, module in model.decoder.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: fired.add(name))
    port.package.greedy_search(model, SOURCE, max_length=2)
    assert {"layers.0", "layers.0.self_attention.query_proj", "layers.0.feed_forward.output_proj"} <= fired


def dropped_out(port):
    """Return a model in training mode, and one in inference mode that has the same weights."""
    dropout = {"embedding": 0.5, "residual": 0.5, "attention": 0.5}
    return build(port, dropout=dropout).train(), build(port, dropout=dropout)


def patched(layer):
    """Let a function of the layer's own, as tools set it, run what the layer would."""

    def forward(original, *args):
        layer.was_called = True
        return original(*args)

    layer.forward, layer.was_called = functools.partial(forward, layer.forward), False


def compiled(layer, name):
    setattr(layer, name, torch.compile(getattr(layer, name), backend="eager"))


CHANGES = {
    "a compiled layer": lambda layers: layers.append(torch.compile(layers.pop(0), backend="eager")),
    "a compiled attention": lambda layers: compiled(layers[0], "self_attention"),
    "a patched layer": lambda layers: patched(layers[0]),
    "a patched projection": lambda layers: patched(layers[0].feed_forward.inner_proj),
    "a patched dropout": lambda layers: patched(layers[0].dropout),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_search_with_layers_that_run_others(port, change, part):
    """Those are in inference mode too, and afterwards as they were."""
    model, plain = dropped_out(port)
    CHANGES[change](getattr(model, part).layers)
    before = modes(model)
    found, expected = (port.package.beam_search(each, SOURCE, max_length=6) for each in (model, plain))
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-12)
    assert modes(model) == before
    assert all(getattr(module, "was_called", True) for module in model.modules())
    torch.compiler.reset()


def test_a_search_with_a_compiled_model(port):
    model, plain = dropped_out(port)
    found = port.package.greedy_search(torch.compile(model, backend="eager"), SOURCE, max_length=6)
    np.testing.assert_array_equal(found.ids, port.package.greedy_search(plain, SOURCE, max_length=6).ids)


# In a process of its own, whose switches no other test has touched.
UNTOUCHED = """
import torch, transformer_torch as port
from conftest import random_weights, tiny_config
config = tiny_config(num_encoder_layers=1, num_decoder_layers=1)
switches = lambda: (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
before = switches()
port.Transformer.from_weights(config, random_weights(config))
assert switches() == before, switches()
assert port.describe()["matrix products"] == "bf16 on a CPU, tf32 on a GPU"
port.onednn.measured = lambda: port.onednn.Measured(1.0, 0.0)
port.Transformer.from_weights(config, random_weights(config), precision="highest")
assert switches() == ("ieee", "ieee")
"""


def test_precision_is_left_alone():
    """Nor does torch's newer way of setting it make the description fail."""
    run_alone(UNTOUCHED)


LEAN = """
import sys, numpy, transformer_torch as port
from conftest import random_weights, tiny_config
config = tiny_config(num_encoder_layers=1, num_decoder_layers=1)
model = port.Transformer.from_weights(config, random_weights(config))
port.greedy_search(model, numpy.array([[5, 6]]), max_length=3)
assert not {"sympy", "torch._dynamo"} & set(sys.modules)
"""


def test_weights_are_loaded_without_sympy():
    """Nor by the compiler, which needs it: its modules take 0.3 seconds and 35 MiB."""
    run_alone(LEAN)


# --- What arrays there are beside the usual ones. ---


def test_arrays_with_any_strides(port):
    model, mask = build(port), SOURCE != 0
    expected = model(SOURCE, TARGET, mask)
    for turned in (lambda x: x[:, ::-1].copy()[:, ::-1], lambda x: x[::-1].copy()[::-1], np.asfortranarray):
        found = model(turned(SOURCE), turned(TARGET), turned(mask))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        memory = turned(model.encode(SOURCE, mask).detach().numpy())
        found = model.decode(TARGET, memory, SOURCE, None, mask)  # at another address, MKL may sum in another order
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    narrow = model(SOURCE.astype(np.uint16)[:, ::-1][:, ::-1], TARGET.astype(">i4"), mask)
    torch.testing.assert_close(narrow, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_memory_that_cannot_be_written_to(port, dtype):
    """As JAX gives its arrays away, those of bfloat16 among them."""
    model = build(port, dtype)
    tensor = model.encode(SOURCE).detach()
    array = port.to_numpy(tensor.float()).astype(dtype) if dtype == "bfloat16" else tensor.numpy()
    array.flags.writeable = False
    found, expected = (model.decode(TARGET, memory, SOURCE) for memory in (array, tensor))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_default_device_is_respected(port):
    with torch.device("meta"):
        assert build(port).device.type == "meta"


def test_meta_device(port):
    """A device without values, and as strict as a GPU about what is on the host."""
    model = build(port).to("meta")
    for source, target in ((SOURCE, TARGET), (torch.tensor(SOURCE, device="meta"), torch.tensor(TARGET))):
        logits = model(source, target, SOURCE != 0)
        assert (logits.device.type, logits.shape) == ("meta", (2, 3, 37))
    cache = model.init_cache(SOURCE, 3, 2)
    logits, cache = model.decode_step(np.ones(4, int), cache)
    cache.reorder(torch.tensor([0, 0, 2, 3], device="meta"))
    assert logits.is_meta
    with pytest.raises(RuntimeError, match="device"):
        cache.self_mask & torch.ones(4, 1, 1, 3, dtype=torch.bool)


def test_fake_tensors(port):
    """What tools learn shapes and memory by. Those of a GPU cannot be indexed in a build of torch without CUDA."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = port.package.Transformer(tiny_config())
        ids = torch.tensor(SOURCE), torch.tensor(TARGET)
        for source, target in ((SOURCE, TARGET), ids):
            logits = model(source, target, target_mask=TARGET != 0)
            assert logits.shape == (2, 3, 37)
            logits.sum().backward()
        assert model.decode(ids[1], model.encode(ids[0]), ids[0]).shape == (2, 3, 37)
        logits, _ = model.decode_step(ids[1][:, 0], model.init_cache(ids[0], 3))
        assert logits.shape == (2, 37)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no rule of its own for this kernel
def test_gradients_of_each_sentence(port):
    from torch.func import functional_call, grad, vmap

    model = build(port)
    parameters = dict(model.named_parameters())

    def loss(parameters, source, target):
        return functional_call(model, parameters, (source[None], target[None])).square().sum()

    source, target = torch.tensor(SOURCE), torch.tensor(TARGET)
    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, source, target)
    for row in range(2):
        expected = torch.autograd.grad(loss(parameters, source[row], target[row]), list(parameters.values()))
        for name, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[name][row], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
def test_transforms_of_a_function_of_the_parameters(port):
    """The ids are not among its arguments, and have no memory that a transform would let be read."""
    from torch.func import functional_call, grad, jvp
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = build(port)
    parameters, ids = dict(model.named_parameters()), (torch.tensor(SOURCE), torch.tensor(TARGET))

    def loss(parameters):
        return functional_call(model, parameters, ids).square().sum()

    found = grad(loss)(parameters)
    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    torch.testing.assert_close([*found.values()], [*expected], rtol=1e-12, atol=1e-12)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of a CPU has no forward derivative, and no second one
        _, along = jvp(loss, (parameters,), (found,))
        second = grad(lambda parameters: sum(x.square().sum() for x in grad(loss)(parameters).values()))(parameters)
    torch.testing.assert_close(along, sum(x.square().sum() for x in expected))
    assert all(x.isfinite().all() for x in second.values())


def test_values_of_functional_tensors_are_not_read(port):
    """They look like tensors of a CPU, and their memory holds anything."""
    model = build(port)
    logits = torch.func.functionalize(model)(torch.tensor(SOURCE), torch.tensor(TARGET))
    torch.testing.assert_close(logits, model(SOURCE, TARGET), rtol=0, atol=1e-12)


IDS = torch.tensor(SOURCE), torch.tensor(TARGET)
SIZES = IDS, (IDS[0][:1, :3], IDS[1][:1, :2]), (IDS[1].repeat(3, 1), IDS[0].repeat(3, 1))


@pytest.mark.parametrize("strict", tiers.first_alone([False, True], "forms"))
def test_export_with_dynamic_sizes(port, strict):
    model = build(port)
    batch, source, target = (torch.export.Dim(name) for name in ("batch", "source", "target"))
    shapes = ({0: batch, 1: source}, {0: batch, 1: target})
    exported = torch.export.export(model, SIZES[0], dynamic_shapes=shapes, strict=strict).module()
    for given in SIZES:
        assert_close(port.to_numpy(exported(*given)), port.to_numpy(model(*given)))


@pytest.mark.extended("habits", "torch")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's own
def test_compiled_with_inductor_as_one_graph(port):
    model = build(port)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for given in SIZES:
        assert_close(port.to_numpy(compiled(*given)), port.to_numpy(model(*given)))
    torch.compiler.reset()


@pytest.mark.extended("habits", "torch")
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning", "ignore:# The axis name:UserWarning")
def test_onnx_with_dynamic_sizes(port, tmp_path):
    import onnxruntime

    # The exporter would round the square root of d_model, a Python number, to float32.
    model, file = build(port, scale_embedding=False), tmp_path / "model.onnx"
    batch, source, target = (torch.export.Dim(name) for name in ("batch", "source", "target"))
    shapes = ({0: batch, 1: source}, {0: batch, 1: target})
    torch.onnx.export(model, SIZES[0], dynamic_shapes=shapes, dynamo=True, verbose=False).save(file)
    session = onnxruntime.InferenceSession(file)
    names = [entry.name for entry in session.get_inputs()]
    for given in SIZES:
        (logits,) = session.run(None, dict(zip(names, (ids.numpy() for ids in given), strict=True)))
        assert_close(logits, port.to_numpy(model(*given)))
