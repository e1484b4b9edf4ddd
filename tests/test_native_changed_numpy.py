"""Changed NumPy models and trainers work or raise an error, and an error changes no parameter."""

from __future__ import annotations

import copy
import re

import ml_dtypes
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
FEED_FORWARD, SELF_ATTENTION = "encoder.layers.0.feed_forward", "encoder.layers.0.self_attention"


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


class Wrapper:
    """A wrapper that scales the output of a layer and forwards all other attributes."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, *arguments, **options):
        return 2 * self.layer(*arguments, **options)

    def __getattr__(self, name):
        return getattr(vars(self)["layer"], name)


class Container(ref.Linear):
    """A linear layer that stores additional arrays in a container."""

    def __init__(self, layer, added):
        self.kernel, self.bias, self.added = layer.kernel, layer.bias, added


class Computed(ref.Linear):
    """A linear layer that computes its kernel."""

    def __init__(self, layer):
        self.bias, self.raw = layer.bias, np.array(layer.kernel).astype(np.float16)

    @property
    def kernel(self):
        return 2.0 * self.raw


class Stored(ref.OutputProjection):
    """An output layer that reads its output in the backward pass."""

    def __call__(self, x):
        self._cap = np.tanh(super().__call__(x))
        self._cap.flags.writeable = False
        return self._cap

    def backward(self, x, dlogits, tap):
        return super().backward(x, dlogits * (1 - self._cap**2), tap)


def scaled_vectors(position):
    return lambda length: 2 * type(position).vectors(position, length)


def tied(dtype="float64", *, fast=True, **options):
    config = tiny_config(**ONE_LAYER, tie_embeddings="all", dropout=DropoutRates(), **options)
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
    **{
        f"an adapter in {added}": (
            set_value(VALUE_PROJ, lambda model, values=values: Container(find(model, VALUE_PROJ), values)),
            f"{UNNAMED}{VALUE_PROJ}.added.",
        )
        for added, values in {
            "a dict": {"low": np.ones(3)},
            "a list": [np.ones(3)],
            "a tuple": (np.ones(3),),
            "a layer": (ref.Linear(2, 3, bias=False),),
        }.items()
    },
    "an adapter in bfloat16": (
        set_value(f"{VALUE_PROJ}.low", lambda _: np.ones(3, ml_dtypes.bfloat16)),
        f"{UNNAMED}{VALUE_PROJ}.low",
    ),
    "a computed kernel": (
        set_value(f"{FEED_FORWARD}.inner_proj", lambda model: Computed(find(model, f"{FEED_FORWARD}.inner_proj"))),
        f"encoder.{INNER_PROJ} must be stored in the model: got a new array",
    ),
    "a flipped array": (
        set_value(f"decoder.{INNER_PROJ}", lambda model: find(model, f"encoder.{INNER_PROJ}")[::-1]),
        f"encoder.{INNER_PROJ} and decoder.{INNER_PROJ} are the same array, but the config does not tie them",
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
    with pytest.raises(ValueError, match=r"must|the config does not tie them"):
        ref.gradients(model, SOURCE, TARGET, LABELS)


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
    "a wrapped layer": (
        set_value(f"{FEED_FORWARD}.inner_proj", lambda model: Wrapper(find(model, f"{FEED_FORWARD}.inner_proj"))),
        f"{FEED_FORWARD}.inner_proj must override backward if it overrides __call__: got Wrapper",
    ),
    "a wrapped block": (
        set_value(FEED_FORWARD, lambda model: Wrapper(find(model, FEED_FORWARD))),
        f"{FEED_FORWARD} must be an instance of GatedFeedForward or PositionwiseFeedForward: got Wrapper; the backward",
    ),
    "a dropout function": (
        set_value("dropout", lambda _: lambda x, *_: x),
        "dropout must be an instance of Dropout: got function",
    ),
    "projected memory": (
        set_value(f"{SELF_ATTENTION}.project", lambda _: lambda memory: memory),
        f"{SELF_ATTENTION} must use MultiHeadAttention.project: got a function of the instance",
    ),
    "a layer in a tuple": (
        lambda model: [
            setattr(model.encoder.layers[0], "__class__", HalfLayer),
            setattr(model.encoder, "layers", tuple(model.encoder.layers)),
        ],
        "encoder.layers.0 must use EncoderLayer.__call__: got HalfLayer.__call__",
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


def test_learned_positions_that_override_only_vectors_are_rejected():
    model = tied(position_encoding="learned", max_length=12)
    model.source_position.vectors = scaled_vectors(model.source_position)
    with pytest.raises(
        ValueError, match=r"^source_position must override backward if it overrides vectors: got Learned"
    ):
        ref.gradients(model, SOURCE, TARGET, LABELS)


def test_output_layer_that_keeps_its_output_is_differentiated():
    found = []
    for quick in (True, False):
        model = tied(fast=quick)
        model.output_proj.__class__ = Stored
        found.append(ref.gradients(model, SOURCE, TARGET, LABELS).parameters[f"encoder.{INNER_PROJ}"])
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)


def test_backward_pass_without_a_gradient_is_rejected():
    model = tied()
    model.encoder.layers[0].feed_forward_norm.__class__ = type("Frozen", (Plain,), {"backward": lambda *_: 2 * _[2]})
    with pytest.raises(
        ValueError, match=r"^backward must compute the gradients of all parameters: .* call tap with zeros"
    ):
        ref.Trainer(model, TrainingConfig()).train_step(SOURCE, TARGET, LABELS)


def test_backward_pass_rejects_replaced_values_and_omits_gradients():
    model, seen = tied(), ref.Recorder(replace={"encoder.output": np.zeros((2, 4, 24))})
    dlogits = model(SOURCE, TARGET, tap=seen)
    with pytest.raises(ValueError, match=r"^seen must not replace values: got encoder\.output; record a call"):
        ref.transformer_backward(model, SOURCE, TARGET, dlogits, seen)
    model(SOURCE, TARGET, tap=(seen := ref.Recorder()))
    found = ref.transformer_backward(model, SOURCE, TARGET, dlogits, seen, ref.Recorder("encoder.**"))
    assert all(name.startswith("encoder.") for gradients in found for name in gradients)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("settings", {"warmup_steps": 3}, "settings must be a TrainingConfig: got dict; write TrainingConfig("),
        ("settings", TrainingConfig(mixed_bfloat16=True), "mixed_bfloat16 is not supported by this package"),
        ("dropout", 0.0, "dropout must be one of global, local: got 0.0"),
        ("seed", -1, "seed must be at least 0: got -1"),
        ("step", 2.0, "step must be an integer: got 2.0"),
    ],
)
def test_invalid_attribute_of_a_trainer_is_rejected(name, value, message):
    trainer = ref.Trainer(tied("float32"), TrainingConfig())
    setattr(trainer, name, value)
    for call in (trainer.train_step, trainer.gradient):
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
            call(SOURCE, TARGET, LABELS)


def test_large_seeds_have_their_own_random_numbers():
    config = tiny_config(**ONE_LAYER, dropout=DropoutRates(embedding=0.3))
    model, losses = ref.Transformer.from_weights(config, random_weights(config)), []
    for seed, step in ((2**32, 0), (0, 1)):
        trainer = ref.Trainer(model, TrainingConfig(), seed=seed)
        trainer.step = step
        losses.append(trainer.gradient(SOURCE, TARGET, LABELS).loss)
    assert losses[0] != losses[1]
    found = [ref.sample(model, SOURCE[:1].repeat(2, 0), seed=seed, max_length=9).ids for seed in (2**32, 0)]
    assert not np.array_equal(found[0][0], found[1][1])


def test_overflow_in_a_step_changes_no_parameter():
    config = tiny_config(**ONE_LAYER, tie_embeddings="none", dropout=DropoutRates())
    model = ref.Transformer.from_weights(config, random_weights(config))
    model.decoder.layers[0].feed_forward_norm.bias[:] = 1e22
    before, trainer = model.export_weights(), ref.Trainer(model, TrainingConfig(warmup_steps=1))
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        trainer.train_step(SOURCE, TARGET, LABELS)
    assert_same_bits(model.export_weights(), before)


def fails_at(failing):
    def tap(name, value):
        if name == failing:
            raise RuntimeError(name)
        return value

    return tap


@pytest.mark.parametrize("failing", ["logits", "decoder.layers.0.output"])
def test_failed_decoding_step_can_be_repeated(failing):
    model = tied()
    cache = model.init_cache(SOURCE, 3)
    model.decode_step(TARGET[:, 0], cache)
    with pytest.raises(RuntimeError, match=failing):
        model.decode_step(TARGET[:, 1], cache, fails_at(failing))
    assert cache.length == 1
    logits, _ = model.decode_step(TARGET[:, 1], cache)
    np.testing.assert_allclose(logits, model(SOURCE, TARGET[:, :2])[:, 1], rtol=0, atol=1e-12)


def test_reordering_across_sequences_is_rejected():
    cache = tied().init_cache(SOURCE, 3, beam_size=2)
    cache.reorder([1, 1, 2, 3])
    with pytest.raises(
        ValueError,
        match=r"^rows must replace each hypothesis with a hypothesis of the same sequence: got row 2 for row 0; ",
    ):
        cache.reorder([2, 1, 2, 3])


@pytest.mark.parametrize("removed", [(1,), (0, 1)])
def test_search_without_self_attention_in_a_layer_matches_a_search_without_a_cache(removed):
    config = tiny_config(num_encoder_layers=1, num_decoder_layers=2)
    model = ref.Transformer.from_weights(config, random_weights(config), "float64")
    for i in removed:
        model.decoder.layers[i].self_attention = None
    found, expected = (ref.greedy_search(model, SOURCE, 6, use_cache=use) for use in (True, False))
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=1e-12)
