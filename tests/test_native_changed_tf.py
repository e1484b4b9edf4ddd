"""Subclassed, frozen, and changed Keras models work in training, searches, and saved files, or raise an error."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config
from native_models import BATCH, NO_DROPOUT, ONE_LAYER, SETTINGS, SOURCE, TARGET, assert_close, build

pytestmark = pytest.mark.only("tf")
CONFIG = tiny_config(**ONE_LAYER, dropout=NO_DROPOUT)


def subclass(port, layer=None, penalty=False):
    """Return a Transformer whose class applies a layer to the encoder memory, or adds a loss."""

    class Changed(port.package.Transformer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.extra = layer

        def call(self, source_ids, target_ids, source_mask=None, target_mask=None, tap=None, training=None):
            memory = self.encode(source_ids, source_mask, training=training)
            if layer is not None:
                memory = layer(memory, training=training)
            logits = self.decode(target_ids, memory, source_mask=source_mask, training=training)
            if penalty:
                self.add_loss(logits[0, 0, 0] ** 2)
            return logits

    return Changed.from_weights(CONFIG, random_weights(CONFIG), dtype="float64", fast=False)


def changing(kind):
    """Return a layer that assigns a value to a variable in each call."""
    import keras

    class Unseeded(keras.layers.Layer):
        supports_masking = True

        def call(self, x, training=False):
            return x + keras.random.normal(keras.ops.shape(x), dtype=x.dtype) if self.trainable else x

    if kind == "global":
        return Unseeded(dtype="float64")
    layer = keras.layers.BatchNormalization(center=False, scale=False, dtype="float64")
    layer.build((None, None, 24))
    return layer


# --- Training ---


@pytest.mark.parametrize("kind", ["Dropout", "GaussianNoise", "replaced"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_random_layers_of_keras_change_in_each_training_step(port, kind, checkpointing):
    """A layer inside the encoder layer is also recomputed, if activation checkpointing is on."""
    import keras

    model = build(port, fast=False, dropout=NO_DROPOUT)
    layer = getattr(keras.layers, "Dropout" if kind == "replaced" else kind)(0.5, name="noise", dtype="float64")
    inner = model.encoder.layers[0].feed_forward
    if kind != "replaced":
        inner.dropout = layer
    settings = port.package.TrainingConfig(**{**vars(SETTINGS), "activation_checkpointing": checkpointing})
    trainers = [port.package.Trainer(model, settings, seed=seed) for seed in (0, 0, 1)]
    if kind == "replaced":
        inner.dropout = layer
    trainers[1].step = 1
    first, second, third = (trainer.gradient(*BATCH) for trainer in trainers)
    assert len({first.loss, second.loss, third.loss}) == 3
    again = trainers[0].gradient(*BATCH)
    assert again.loss == first.loss
    assert_same_bits(again.parameters, first.parameters)


def test_recomputed_layers_advance_their_random_generators(port):
    stack = port.package.EncoderStack(CONFIG.replace(dropout={**NO_DROPOUT, "residual": 0.5}), "float64")
    x = np.random.default_rng(0).normal(size=(2, 4, 24))
    stack.activation_checkpointing = True
    first, second = (port.to_numpy(stack(x, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 0.1


def regularized(port):
    import keras

    model = build(port, fast=False)
    model.encoder.layers[0].feed_forward.inner_proj.activity_regularizer = keras.regularizers.L2(1.0)
    return model


@pytest.mark.parametrize("create", [regularized, lambda port: subclass(port, penalty=True)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_rejects_additional_losses(port, create, checkpointing):
    model = create(port)
    settings = port.package.TrainingConfig(**{**vars(SETTINGS), "activation_checkpointing": checkpointing})
    trainer = port.package.Trainer(model, settings)
    for call in (trainer.train_step, trainer.gradient, lambda *batch: port.package.gradients(model, *batch)):
        with pytest.raises(ValueError, match=r"the model adds a loss .*; remove the loss, or train with compile and"):
            call(*BATCH)
    assert trainer.step == 0


@pytest.mark.parametrize(("kind", "name"), [("batch", "moving_mean"), ("global", "the global random generator")])
def test_training_rejects_layers_that_change_a_variable(port, kind, name):
    """A Trainer would discard the new moving average, and draw the same random numbers in each step."""
    model = subclass(port, changing(kind))
    trainer = port.package.Trainer(model, SETTINGS)
    with pytest.raises(ValueError, match=rf"{name} changes when the model is called, .*; freeze its layer, "):
        trainer.train_step(*BATCH)
    assert trainer.step == 0
    model.extra.trainable = False
    trainer.train_step(*BATCH)


@pytest.mark.parametrize("how", ["constructor", "loaded", "clone"])
def test_frozen_model_is_not_trained(port, how, tmp_path):
    """Keras stores that the model is frozen, but not that its variables are."""
    import keras

    model = port.package.Transformer(CONFIG, fast=False, trainable=how != "constructor")
    model.trainable = False if how != "constructor" else model.trainable
    if how == "clone":
        model = keras.models.clone_model(model)
    elif how == "loaded":
        model.save(tmp_path / "model.keras")
        model = keras.saving.load_model(tmp_path / "model.keras")
    expected = model.export_weights()
    found = port.package.gradients(model, *BATCH)
    assert (found.parameters, found.frozen) == ({}, tuple(expected))
    port.package.Trainer(model, SETTINGS).train_step(*BATCH)
    assert_same_bits(model.export_weights(), expected)


def test_values_in_a_stateless_scope_are_used_by_searches_and_rejected_by_training(port):
    import keras

    model = port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG, 1))
    other = port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG, 2), fast=False)
    scores = [port.package.greedy_search(x, SOURCE, 4).scores for x in (model, other)]
    trainer = port.package.Trainer(model, SETTINGS)
    values = [(a, b.value) for a, b in zip(model.variables, other.variables, strict=True)]
    with keras.StatelessScope(values):
        found = port.package.greedy_search(model, SOURCE, 4).scores
        calls = trainer.train_step, trainer.gradient, trainer.evaluate
        for call in (*calls, lambda *batch: port.package.gradients(model, *batch)):
            with pytest.raises(RuntimeError, match=r"must be called outside of keras\.StatelessScope; assign the val"):
                call(*BATCH)
    np.testing.assert_allclose(found, scores[1], rtol=1e-5)
    np.testing.assert_allclose(port.package.greedy_search(model, SOURCE, 4).scores, scores[0], rtol=1e-5)


# --- Subclasses and replaced layers ---


def test_loading_keeps_values_that_a_subclass_assigns(port):
    class Scaled(port.package.Transformer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.factor = self.add_weight(shape=(), initializer="ones", trainable=False, name="factor")
            self.factor.assign(2.0)

    weights = random_weights(CONFIG)
    model = Scaled.from_weights(CONFIG, weights)
    assert float(model.factor) == 2.0
    assert_same_bits(model.export_weights(), weights)


def test_subclass_with_a_different_signature_is_rejected(port):
    with pytest.raises(TypeError, match=r"Mine\.call must have the parameters source_ids and target_ids: got "):

        class Mine(port.package.Transformer):
            def call(self, inputs, training=None):
                return super().call(*inputs, training=training)

    class Other(port.package.Transformer):
        def call(self, *args, **options):
            return super().call(*args, **options)

    assert Other.from_weights(CONFIG, random_weights(CONFIG))(SOURCE, TARGET).shape == (2, 3, 37)


@pytest.mark.parametrize(("name", "attribute", "value"), [("Dropout", "rate", 0.5), ("LayerNorm", "epsilon", 0.25)])
def test_changed_attribute_is_saved_with_a_functional_model(port, name, attribute, value, tmp_path):
    import keras

    layer = port.package.LayerNorm(CONFIG) if name == "LayerNorm" else port.package.layers.Dropout(0.1)
    x = keras.Input((24,))
    model = keras.Model(x, layer(x))
    setattr(layer, attribute, value)
    model.save(tmp_path / "model.keras")
    for copy in (keras.saving.load_model(tmp_path / "model.keras"), keras.models.clone_model(model)):
        assert getattr(copy.layers[-1], attribute) == value


def test_changed_activation_is_saved_with_a_functional_model(port):
    layer = port.package.PositionwiseFeedForward(CONFIG)
    layer.activation = "gelu"
    assert type(layer).from_config(layer.get_config()).activation == "gelu"


def test_search_with_a_replaced_layer_without_self_attention_matches_score(port):
    config = CONFIG.replace(num_decoder_layers=2)
    model = port.package.Transformer.from_weights(config, random_weights(config), dtype="float64", fast=False)
    old = model.decoder.layers[1]
    layer = port.package.DecoderLayer(config, "float64", with_self_attention=False)
    for name in ("cross_attention", "cross_attention_norm", "feed_forward", "feed_forward_norm"):
        getattr(layer, name).set_weights(getattr(old, name).get_weights())
    model.decoder.layers[1] = layer
    found = port.package.greedy_search(model, SOURCE, 4)
    assert_close(found.scores, port.to_numpy(port.package.score(model, SOURCE, found.ids).sequences))


# --- Inputs ---


@pytest.mark.parametrize("form", ["list", "dict", "tuple"])
def test_parts_accept_all_inputs_in_one_structure(port, form):
    encoder = port.package.Encoder.from_weights(CONFIG, random_weights(CONFIG))
    decoder = port.package.Decoder.from_weights(CONFIG, random_weights(CONFIG))
    memory = port.to_numpy(encoder(SOURCE))
    inputs = {"target_ids": TARGET, "memory": memory, "source_ids": SOURCE}
    forms = {"list": lambda x: [*x.values()], "dict": lambda x: x, "tuple": lambda x: (*x.values(),)}
    form = forms[form]
    np.testing.assert_allclose(encoder.predict(form({"source_ids": SOURCE}), verbose=0), memory, atol=1e-5)
    expected = port.to_numpy(decoder(TARGET, memory, SOURCE))
    np.testing.assert_allclose(decoder.predict(form(inputs), verbose=0), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["Transformer", "EncoderLayer"])
@pytest.mark.parametrize("is_global", [False, True])
def test_policy_map_is_rejected(port, name, is_global):
    """Keras looks up the policy of a layer by its path, which blocks don't have when they create their variables."""
    import keras

    policy = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policy[".*_norm"] = keras.DTypePolicy("bfloat16")
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy if is_global else before)
    try:
        with pytest.raises(TypeError, match="dtype must be one policy for all layers: got a DTypePolicyMap; pass"):
            getattr(port.package, name)(CONFIG, **({} if is_global else {"dtype": policy}))
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("rows", [1, 300])
def test_long_attention_mask_can_have_an_unknown_length(port, rows):
    import tensorflow as tf

    layer = build(port, "float32").encoder.layers[0].self_attention
    random = np.random.default_rng(0)
    x, mask = random.normal(size=(1, 300, 24)).astype("float32"), random.random((1, 1, rows, 300)) < 0.5
    signature = [tf.TensorSpec([None, 300, 24]), tf.TensorSpec([None, 1, None, None], tf.bool)]
    traced = tf.function(lambda x, mask: layer(x, x, mask), signature, autograph=False)
    np.testing.assert_allclose(traced(x, mask).numpy(), layer(x, x, mask).numpy(), atol=1e-5)


def test_sample_with_a_tiny_temperature_is_greedy(port):
    """TensorFlow rounds float32 values below 1.2e-38 to zero."""
    model = build(port, "float32", fast=False)
    found = port.package.sample(model, SOURCE, max_length=4, temperature=1e-38)
    np.testing.assert_array_equal(found.ids, port.package.greedy_search(model, SOURCE, 4).ids)


def test_learned_positions_reject_long_inputs(port):
    layer = port.package.LearnedPosition(CONFIG.replace(position_encoding="learned", max_length=4))
    with pytest.raises(ValueError, match="length must be at most 4 for this model: got 5"):
        layer(np.zeros((1, 5, 24), "float32"))
