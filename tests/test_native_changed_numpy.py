"""Changed NumPy models and trainers work or raise an error, and an error changes no parameter."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config

import reference_numpy as ref
from transformer_spec import DropoutRates, TrainingConfig
from transformer_spec.names import find

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])
LABELS = np.array([[3, 4, 2], [5, 2, 0]])
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}
VALUE_PROJ = "encoder.layers.0.self_attention.value_proj"
INNER_PROJ = "layers.0.feed_forward.inner_proj.kernel"


class Adapter(ref.Linear):
    """A linear layer with a low-rank update, but without its backward pass."""

    def __init__(self, layer):
        self.kernel, self.bias, self.low, self.high = layer.kernel, layer.bias, np.ones((24, 2)), np.ones((2, 24))

    def __call__(self, x):
        return super().__call__(x) + x @ self.low @ self.high


class RMSNorm(ref.LayerNorm):
    """A layer norm that doesn't subtract the mean, without its backward pass."""

    def __call__(self, x):
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.epsilon) * self.scale


class Plain(RMSNorm):
    """A layer that has the backward pass of its forward pass."""

    def __call__(self, x):
        return 2 * x

    def backward(self, x, dy, tap):
        tap("scale", np.zeros_like(self.scale))
        tap("bias", np.zeros_like(self.bias))
        return 2 * dy


class HalfLayer(ref.EncoderLayer):
    """An encoder layer with a different output."""

    def __call__(self, *arguments, **options):
        return 0.5 * super().__call__(*arguments, **options)


def tied(dtype="float64", *, fast=True):
    config = tiny_config(**ONE_LAYER, tie_embeddings="all", dropout=DropoutRates())
    return ref.Transformer.from_weights(config, random_weights(config), dtype, fast=fast)


def replace(model, path, value):
    owner, _, name = path.rpartition(".")
    owner = find(model, owner) if owner else model
    if name.isdecimal():
        owner[int(name)] = value
    else:
        setattr(owner, name, value)


def set_value(path, value):
    """Return a function that replaces an attribute of a model with a function of the model."""
    return lambda model: replace(model, path, value(model))


UNNAMED = "all parameters must have canonical names: got "
UNEXPORTED = {
    "an added bias": (set_value(f"{VALUE_PROJ}.bias", lambda _: np.ones(24)), f"{UNNAMED}{VALUE_PROJ}.bias"),
    "an added norm": (
        set_value("encoder.final_norm", lambda model: ref.LayerNorm(model.config)),
        f"{UNNAMED}encoder.final_norm.scale; encoder.final_norm.bias; merge or remove them",
    ),
    "an untied output": (set_value("output_proj.kernel", lambda _: np.ones((24, 37))), f"{UNNAMED}output_proj.kernel"),
    "an untied embedding": (
        set_value("target_embedding", lambda model: ref.TokenEmbedding(37, model.config)),
        f"{UNNAMED}target_embedding.table",
    ),
    "an adapter": (
        set_value(VALUE_PROJ, lambda model: Adapter(find(model, VALUE_PROJ))),
        f"{UNNAMED}{VALUE_PROJ}.low; {VALUE_PROJ}.high",
    ),
    "a shared array": (
        set_value(f"decoder.{INNER_PROJ}", lambda model: find(model, f"encoder.{INNER_PROJ}")),
        f"encoder.{INNER_PROJ} and decoder.{INNER_PROJ} are the same array, but the config does not tie them",
    ),
    "an appended layer": (
        lambda model: model.encoder.layers.append(copy.deepcopy(model.encoder.layers[0])),
        "encoder.layers must have 1 layers, as in the config: got 2",
    ),
}


@pytest.mark.parametrize("change", UNEXPORTED)
def test_parameters_that_contradict_the_config_are_not_exported(change):
    model, (changed, message) = tied(), UNEXPORTED[change]
    changed(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        model.export_weights()
    with pytest.raises(ValueError, match=re.escape(message)):
        ref.set_weights(model, random_weights(model.config))


@pytest.mark.parametrize("change", UNEXPORTED)
def test_parameters_that_contradict_the_config_are_not_trained(change):
    model = tied()
    UNEXPORTED[change][0](model)
    with pytest.raises(ValueError, match=r"must|the config does not tie them"):
        ref.Trainer(model, TrainingConfig())


def test_arrays_of_private_attributes_are_not_parameters():
    model = tied()
    model._table = model.encoder._states = np.ones(3)
    model.encoder.model = model
    assert_same_bits(model.export_weights(), tied().export_weights())


UNDIFFERENTIATED = {
    "a layer": (
        lambda model: setattr(model.encoder.layers[0].feed_forward_norm, "__class__", RMSNorm),
        "encoder.layers.0.feed_forward_norm must override backward if it overrides __call__: got RMSNorm",
    ),
    "a block": (
        lambda model: setattr(model.encoder.layers[0], "__class__", HalfLayer),
        "encoder.layers.0 must use EncoderLayer.__call__: got HalfLayer.__call__",
    ),
    "an attention function": (
        lambda model: setattr(model.encoder.layers[0].self_attention, "attend", lambda q, k, v, *_: v),
        "encoder.layers.0.self_attention.attend must be scaled_dot_product_attention: got a different function",
    ),
    "a tied embedding": (UNEXPORTED["an untied embedding"][0], "target_embedding must be source_embedding"),
}


@pytest.mark.parametrize("change", UNDIFFERENTIATED)
def test_gradients_of_a_changed_forward_pass_are_rejected(change):
    model, (changed, message) = tied(), UNDIFFERENTIATED[change]
    changed(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        ref.gradients(model, SOURCE, TARGET, LABELS)
    with pytest.raises(ValueError, match=re.escape(message)):
        ref.Trainer(model, TrainingConfig())


def test_layer_with_its_own_backward_pass_is_differentiated():
    model, bias = tied(), f"encoder.{INNER_PROJ.replace('kernel', 'bias')}"
    model.encoder.layers[0].feed_forward_norm.__class__ = Plain
    gradient, step, losses = ref.gradients(model, SOURCE, TARGET, LABELS).parameters[bias], 1e-6, []
    for offset in (step, -2 * step):
        find(model, bias)[3] += offset
        losses.append(ref.gradients(model, SOURCE, TARGET, LABELS).loss)
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(gradient[3], abs=1e-7)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("change", [read_only, lambda array: array.astype(int), lambda array: array[:, :-1]])
def test_failed_step_updates_no_parameter(quick, change):
    model = tied(fast=quick)
    trainer, name = ref.Trainer(model, TrainingConfig()), f"decoder.{INNER_PROJ}"
    gradient = trainer.gradient(SOURCE, TARGET, LABELS).parameters
    replace(model, name, change(find(model, name)))
    before = model.export_weights()
    trainer.optimizer.parameters = {path: find(model, path) for path in before}
    with pytest.raises(ValueError, match=f"^{name} must be a writable floating-point array of shape"):
        trainer.optimizer.update(gradient, 1.0, 0.1, (0.1, 0.02))
    assert_same_bits(model.export_weights(), before)


@pytest.mark.parametrize("change", [read_only, lambda array: array.astype(int), lambda array: array[:, :-1]])
def test_failed_set_weights_changes_no_parameter(change):
    model, name = tied(), f"decoder.{INNER_PROJ}"
    replace(model, name, change(find(model, name)))
    before, weights = model.export_weights(), random_weights(model.config, seed=1)
    with pytest.raises(ValueError, match=f"^{name} must be a writable floating-point array of shape"):
        ref.set_weights(model, weights)
    assert_same_bits(model.export_weights(), before)


def test_weights_that_overflow_change_no_parameter():
    model, name = tied("float32"), f"decoder.{INNER_PROJ}"
    before, weights = model.export_weights(), random_weights(model.config, seed=1)
    weights = {path: array.astype(np.float64) for path, array in weights.items()}
    weights[name][0, 0] = 1e300
    with pytest.raises(ValueError, match=f"{name} overflows float32"):
        ref.set_weights(model, weights)
    assert_same_bits(model.export_weights(), before)


def test_parameter_removed_from_the_optimizer_is_rejected():
    trainer = ref.Trainer(tied(), TrainingConfig())
    del trainer.optimizer.parameters[f"decoder.{INNER_PROJ}"]
    with pytest.raises(ValueError, match=f"must update all parameters of the model: decoder.{INNER_PROJ} missing"):
        trainer.train_step(SOURCE, TARGET, LABELS)
