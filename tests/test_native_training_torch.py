"""PyTorch training idioms: hooks, DDP, compilation, frozen and parametrized layers, and any optimizer."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import assert_same_bits
from modules_torch import compiled, modes
from native_models import BATCH, LABELS, SETTINGS, SOURCE, TARGET, assert_close, build, losses

from reference_numpy import TrainingConfig, parameter_shapes

pytestmark = pytest.mark.only("torch")


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
    """A process group with one process."""
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2, "clip_norm": 0.1}])
def test_distributed_data_parallel_matches_one_process(port, process_group, settings):
    """DistributedDataParallel works around a model and in a trainer: its hooks reduce each gradient."""
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
def test_distributed_data_parallel_averages_gradients_of_two_processes(port, tmp_path):
    """The gradient is averaged over processes with different rows, in a custom loop and in a trainer."""
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


def test_compiled_model_can_be_trained(port):
    expected = port.package.Trainer(build(port), SETTINGS)
    compiled = torch.compile(build(port), backend="eager")
    trainer = port.package.Trainer(compiled, SETTINGS)
    np.testing.assert_allclose(losses(trainer), losses(expected), rtol=1e-12)
    np.testing.assert_allclose(float(trainer.evaluate(*BATCH)[0]), float(expected.evaluate(*BATCH)[0]), rtol=1e-12)
    torch.compiler.reset()


@pytest.mark.parametrize("part", ["self_attention", "self_attention_norm", "cross_attention", "feed_forward"])
def test_compiled_sublayer_matches_the_plain_sublayer(port, part):
    """A compiled module doesn't support truth tests."""
    model, plain = build(port), build(port)
    compiled(model.decoder.layers[0], part)
    with torch.no_grad():  # torch warns otherwise
        torch.testing.assert_close(model(SOURCE, TARGET), plain(SOURCE, TARGET), rtol=1e-12, atol=1e-12)
    torch.compiler.reset()


def test_frozen_modules_keep_weights_and_moments(port):
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


def test_gradients_list_frozen_parameters(port):
    """Gradients for taps are returned even if no parameter before the tap is trainable."""
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


def test_unfreezing_parameters_matches_resuming(port):
    """A state has one step count for all parameters, which determines the bias correction of the moments."""
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


def test_parameter_groups_added_to_a_trainer_are_trained(port):
    """Added parameters are trained as well, unless they are frozen."""
    trainer, expected = (port.package.Trainer(build(port), SETTINGS) for _ in range(2))
    added, frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    trainer.optimizer.add_param_group({"params": [added]})
    trainer.optimizer.add_param_group({"params": frozen})
    added.grad = torch.ones(3)
    trainer.optimizer.zero_grad = lambda: trainer.model.zero_grad()  # keeps added.grad, which no loss sets
    assert losses(trainer) == losses(expected)
    assert_same_bits(trainer.model.export_weights(), expected.model.export_weights())
    assert trainer.optimizer.state[added]["step"] == 3
    assert frozen not in trainer.optimizer.state
    assert (added < 1.0).all()
    assert (frozen == 1.0).all()


def test_caller_autocast_applies_in_training(port):
    def first(mixed, autocast):
        trainer = port.package.Trainer(build(port, dtype="float32"), TrainingConfig(mixed_bfloat16=mixed))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return losses(trainer, 1)

    assert first(mixed=False, autocast=True) == first(mixed=True, autocast=False) != first(mixed=False, autocast=False)


def test_gradients_and_evaluation_preserve_training_modes(port):
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
def test_any_optimizer_with_parameter_groups_reduces_the_loss(port, name):
    """Any optimizer works with our loss, for example without weight decay for norms and biases."""
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
    """Return the loss without dropout."""
    model.eval()
    with torch.no_grad():
        found = loss().item()
    model.train()
    return found


def test_parametrized_layer_receives_the_gradient(port):
    """The weight is computed from another parameter, which receives the gradient."""
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


def test_trainer_supports_a_parametrized_layer(port):
    """The trainer returns gradients with respect to the computed weight. Calls that would lose data raise an error."""
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
        with pytest.raises(
            ValueError, match=f"{name} must be an nn.Parameter: got a tensor computed by a parametrization"
        ):
            refused()


def test_gradients_of_a_pruned_layer_match_the_masked_weight(port):
    """The weight of a pruned layer is computed from another parameter and a mask before each call."""
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


def test_trainers_in_parallel_threads_have_independent_dropout(port):
    """Dropout depends only on the seed and the step, even if another trainer takes steps at the same time."""
    dropout = {"embedding": 0.3, "residual": 0.3, "attention": 0.3, "feed_forward": 0.3}

    def run(seed):
        return losses(port.package.Trainer(build(port, dropout=dropout), SETTINGS, seed), 30)

    expected = [run(seed) for seed in range(2)]
    state = torch.get_rng_state()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_step_count_is_exact_with_any_default_dtype(port):
    """Bfloat16 can't represent 257."""
    model = build(port, "float32")
    trainer = port.package.Trainer(model, SETTINGS)
    trainer.step = 256
    torch.set_default_dtype(torch.bfloat16)
    try:
        losses(trainer, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {257.0}


@pytest.mark.parametrize("method", ["train_step", "gradient"])
def test_training_rejects_a_model_that_was_cast_to_bfloat16(port, method):
    trainer = port.package.Trainer(build(port, "float32"), SETTINGS)
    trainer.model.bfloat16()
    with pytest.raises(ValueError, match="training requires float32 or float64 weights: got bfloat16"):
        getattr(trainer, method)(*BATCH)


def test_hook_in_a_training_step_can_train_a_different_model(port):
    """Both steps use the default generator, and each uses its seed."""
    dropout = {"embedding": 0.3, "residual": 0.3, "attention": 0.3, "feed_forward": 0.3}
    outer, inner = (port.package.Trainer(build(port, dropout=dropout), SETTINGS, seed) for seed in range(2))
    expected = [float(trainer.gradient(*BATCH).loss) for trainer in (outer, inner)]
    found = []
    outer.model.encoder.register_forward_hook(lambda *args: found.append(float(inner.train_step(*BATCH).loss)))
    assert [float(outer.train_step(*BATCH).loss), *found] == expected


def test_hook_in_a_training_step_cannot_train_the_same_model(port):
    trainer = port.package.Trainer(build(port), SETTINGS)
    hook = trainer.model.encoder.register_forward_hook(lambda *args: trainer.train_step(*BATCH) and None)
    with pytest.raises(RuntimeError, match="a hook must not start a training step of the model that is being trained"):
        trainer.train_step(*BATCH)
    hook.remove()
    assert trainer.step == 0
    losses(trainer, 1)


def test_gradient_of_a_trainer_keeps_accumulated_gradients(port):
    model = build(port)
    trainer = port.package.Trainer(model, SETTINGS)
    model(SOURCE, TARGET).sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    trainer.gradient(*BATCH)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name], rtol=0, atol=0)


def test_model_of_a_trainer_cannot_be_replaced(port):
    """Otherwise, the trainer would keep computing the loss of the first model."""
    trainer = port.package.Trainer(build(port), SETTINGS)
    with pytest.raises(AttributeError, match="model"):
        trainer.model = build(port)


@pytest.mark.parametrize("mixed", [False, True])
def test_steps_within_one_autocast_context_use_the_new_weights(port, mixed):
    settings = dataclasses.replace(SETTINGS, mixed_bfloat16=mixed)
    together, separate = (port.package.Trainer(build(port, "float32"), settings) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16, enabled=not mixed):
        found = losses(together)
    for loss in found:
        with torch.autocast("cpu", torch.bfloat16, enabled=not mixed):
            assert losses(separate, 1) == [loss]


@pytest.mark.parametrize("transform", ["inference_mode", "vmap", "compile"])
def test_invalid_labels_are_rejected_in_transformed_code(port, transform):
    """Values of labels are not read there, so the loss itself must not accept negative labels."""
    logits, config = build(port)(SOURCE, TARGET).detach(), build(port).config
    labels = torch.tensor(LABELS).masked_fill(torch.tensor(LABELS) == 0, -100)

    cross_entropy = port.package.cross_entropy

    def loss(x, y):
        return cross_entropy(x, y, config)[0]

    def transformed():
        if transform == "vmap":
            return torch.vmap(lambda x, y: loss(x[None], y[None]))(logits, labels)
        if transform == "compile":
            return torch.compile(loss, backend="eager")(logits, labels)
        with torch.inference_mode():
            return loss(logits, labels.clone())

    with pytest.raises(RuntimeError, match="index -100 is out of bounds"):
        transformed()
    torch.compiler.reset()
