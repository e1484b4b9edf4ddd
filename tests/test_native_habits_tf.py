"""Keras and TensorFlow usage that used to return wrong results without an error or to raise an unhelpful error."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from conftest import random_weights, tiny_config
from native_models import BATCH, LABELS, NO_DROPOUT, ONE_LAYER, SETTINGS, SOURCE, TARGET, assert_close, build

pytestmark = pytest.mark.only("tf")
HALF = dict.fromkeys(NO_DROPOUT, 0.5)
CONFIG = tiny_config(**ONE_LAYER)
INNER = "encoder.layers.0.feed_forward.inner_proj.kernel"


def kernel(model):
    return model.encoder.layers[0].feed_forward.inner_proj.kernel


def functional(port):
    """Return a functional model that wraps our model."""
    import keras

    ids = [keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")]
    return keras.Model(ids, build(port)(ids))


# --- Training ---


@pytest.mark.parametrize("method", ["train_step", "gradient"])
def test_traced_training_step_is_rejected(port, method):
    """A traced step would increment the step number only once and always use the first learning rate."""
    import tensorflow as tf

    trainer = port.package.Trainer(build(port), SETTINGS)
    with pytest.raises(RuntimeError, match=rf"{method} must be called outside of tf\.function"):
        tf.function(lambda: getattr(trainer, method)(*BATCH).loss)()
    assert trainer.step == 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("steps", [0, 1])
def test_copying_a_trainer_is_rejected(port, duplicate, steps):
    """A copied trainer would update variables that don't belong to its model."""
    trainer = port.package.Trainer(build(port), SETTINGS)
    for _ in range(steps):
        trainer.train_step(*BATCH)
    with pytest.raises(TypeError, match=r"a Trainer cannot be copied; .* export_state"):
        duplicate(trainer)


def test_changed_settings_apply_to_the_next_step(port):
    changed = dataclasses.replace(SETTINGS, clip_norm=1e-3, beta1=0.5, accumulation_steps=2)
    trainer, expected = port.package.Trainer(build(port), SETTINGS), port.package.Trainer(build(port), SETTINGS)
    for each in (trainer, expected):
        each.train_step(*BATCH)
    trainer.settings = changed
    resumed = port.package.Trainer(expected.model, changed)
    resumed.load_state(expected.export_state())
    for each in (trainer, resumed):
        each.train_step(*BATCH)
    for name, weight in resumed.model.export_weights().items():
        assert_close(trainer.model.export_weights()[name], weight)


@pytest.mark.parametrize("kind", ["regularizer", "constraint"])
def test_trainer_rejects_regularizers_and_constraints(port, kind):
    import keras

    model = build(port)
    setattr(
        kernel(model), kind, {"regularizer": keras.regularizers.L2(1.0), "constraint": keras.constraints.NonNeg()}[kind]
    )
    with pytest.raises(ValueError, match=rf"{INNER} has a {kind}; remove the {kind}, or train with compile and fit"):
        port.package.Trainer(model, SETTINGS)


def test_regularizer_of_a_frozen_parameter_has_no_effect(port):
    import keras

    model = build(port)
    kernel(model).regularizer = keras.regularizers.L2(1.0)
    model.encoder.trainable = False
    port.package.Trainer(model, SETTINGS).train_step(*BATCH)


def test_load_state_rejects_other_types(port):
    trainer = port.package.Trainer(build(port), SETTINGS)
    with pytest.raises(TypeError, match=r"state must be a TrainingState: got dict; write TrainingState\(\*\*state\)"):
        trainer.load_state(vars(trainer.export_state()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", None])
def test_loss_does_not_round_labels(port, dtype):
    import keras

    config = tiny_config(source_vocab_size=1000, target_vocab_size=1000, **ONE_LAYER)
    labels = np.array([[257, 999, 2]])
    logits = np.random.default_rng(0).normal(size=(1, 3, 1000)).astype("float32")
    expected = port.package.CrossEntropy(config)(labels, logits)
    before = keras.config.floatx()
    try:
        if dtype is None:
            keras.config.set_floatx("bfloat16")
        found = port.package.CrossEntropy(config, **({} if dtype is None else {"dtype": dtype}))(labels, logits)
    finally:
        keras.config.set_floatx(before)
    assert abs(float(found) - float(expected)) <= 1e-5


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_train_step_of_a_frozen_model_changes_no_weights(port, dtype):
    model = build(port, dtype)
    expected = model.export_weights()
    model.trainable = False
    assert float(port.package.Trainer(model, SETTINGS).train_step(*BATCH).gradient_norm) == 0.0
    for name, weight in model.export_weights().items():
        np.testing.assert_array_equal(weight, expected[name])


def replace_inner(package, model):
    with_canonical_path = package.layers.Linear(24, 48, bias=True, dtype="float64", name="inner")
    model.encoder.layers[0].feed_forward.inner_proj = with_canonical_path


CHANGES = {
    "replaced": replace_inner,
    "swapped": lambda package, model: model.encoder.layers.reverse(),
    "removed": lambda package, model: model.encoder.layers.pop(),
    "LoRA": lambda package, model: model.encoder.layers[0].self_attention.query_proj.enable_lora(2),
    "quantized": lambda package, model: model.encoder.layers[0].feed_forward.inner_proj.quantize("int8"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fast", [True, False])
def test_trainer_rejects_a_model_with_changed_variables(port, change, fast):
    """A step would train variables that the model no longer uses, and report their loss."""
    config = CONFIG.replace(num_encoder_layers=2)
    model = port.package.Transformer.from_weights(config, random_weights(config), dtype="float64", fast=fast)
    trainer = port.package.Trainer(model, SETTINGS)
    trainer.evaluate(*BATCH)
    CHANGES[change](port.package, model)
    for method in (trainer.train_step, trainer.gradient, trainer.evaluate):
        with pytest.raises(ValueError, match=r"the model's trainable variables have changed: .*; create a new Trainer"):
            method(*BATCH)
    assert trainer.step == 0


def test_training_step_follows_a_changed_dropout_rate(port):
    import keras

    model = build(port, dropout=HALF)
    trainer = port.package.Trainer(model, SETTINGS)
    trainer.train_step(*BATCH)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    expected = trainer.gradient(*BATCH).loss
    assert abs(float(trainer.train_step(*BATCH).loss) - expected) <= 1e-9


def test_search_follows_changed_attributes_of_layers(port):
    model, other = build(port), build(port, activation="gelu")
    port.package.greedy_search(model, SOURCE, 4)  # traces the model
    for stack in (model.encoder, model.decoder):
        stack.layers[0].feed_forward.activation = "gelu"
    expected = port.package.greedy_search(other, SOURCE, 4)
    assert_close(port.package.greedy_search(model, SOURCE, 4).scores, expected.scores)
    model.decoder.layers[0].feed_forward.inner_proj.dtype_policy = "mixed_bfloat16"
    assert np.abs(port.package.greedy_search(model, SOURCE, 4).scores - expected.scores).max() > 1e-6


# --- Dropout ---


def test_dropout_follows_the_training_flag_of_an_outer_model(port):
    import keras

    class Outer(keras.Model):
        """A model that calls the encoder and the decoder separately."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, inputs):
            source, target = inputs
            return self.inner.decode(target, self.inner.encode(source), source)

    inner = build(port, dropout=HALF)
    outer, expected = Outer(inner), np.asarray(inner(SOURCE, TARGET))
    assert_close(np.asarray(outer((SOURCE, TARGET))), expected)
    assert np.abs(np.asarray(outer((SOURCE, TARGET), training=True)) - expected).max() > 0.1


def test_encoder_and_decoder_dropout_follow_the_enclosing_layer(port):
    import keras

    class Half(keras.layers.Layer):
        """A layer that calls either the encoder or the decoder."""

        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, ids):
            return self.function(ids)

    model = build(port, dropout=HALF)
    memory = model.encode(SOURCE)
    for ids, function in ((SOURCE, model.encode), (TARGET, lambda ids: model.decode(ids, memory, SOURCE))):
        still, moved = (np.asarray(Half(function)(ids, training=training)) for training in (False, True))
        assert np.abs(still - moved).max() > 0.1


def test_scores_have_no_dropout_in_training(port):
    import keras
    import tensorflow as tf

    model = build(port, dropout=HALF)
    expected = port.package.score(build(port), SOURCE, LABELS)

    class Scored(keras.layers.Layer):
        """A layer that returns the scores of translations."""

        def call(self, x):
            return port.package.score(model, SOURCE, LABELS).tokens + 0.0 * x

    assert_close(np.asarray(Scored(dtype="float64")(tf.zeros([], tf.float64), training=True)), expected.tokens.numpy())
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(port.package.score(model, SOURCE, LABELS)[0])
    assert np.abs(tape.gradient(loss, kernel(model).value)).max() > 0.0


# --- Models of a different type, and traced functions ---


CALLS = {
    "greedy_search": lambda package, model: package.greedy_search(model, SOURCE, 3),
    "beam_search": lambda package, model: package.beam_search(model, SOURCE, 2, max_length=3),
    "sample": lambda package, model: package.sample(model, SOURCE, max_length=3),
    "score": lambda package, model: package.score(model, SOURCE, LABELS),
    "gradients": lambda package, model: package.gradients(model, *BATCH),
    "Trainer": lambda package, model: package.Trainer(model, SETTINGS),
}


@pytest.mark.parametrize("call", CALLS)
def test_model_of_another_type_raises_type_error(port, call):
    for model in (functional(port), port.package.Encoder.from_weights(CONFIG, random_weights(CONFIG))):
        with pytest.raises(TypeError, match=f"model must be a Transformer: got {type(model).__name__}"):
            CALLS[call](port.package, model)


@pytest.mark.parametrize("call", ["sample", "score", "gradients"])
def test_eager_only_calls_raise_inside_tf_function(port, call):
    import tensorflow as tf

    model = build(port)
    with pytest.raises(RuntimeError, match=r"must be called outside of tf\.function"):
        tf.function(lambda: CALLS[call](port.package, model)[0])()


# --- Saving and loading ---


def test_checkpoint_contains_a_replaced_layer(port, tmp_path):
    import tensorflow as tf

    model = build(port, num_encoder_layers=2)
    new = model.encoder.layers[0] = port.package.EncoderLayer(model.config, "float64", name="layer_0")
    expected = np.asarray(model(SOURCE, TARGET))
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "held"))
    new.feed_forward.inner_proj.kernel.assign(new.feed_forward.inner_proj.kernel * 0.0)
    tf.train.Checkpoint(model=model).read(path).assert_consumed()
    assert_close(np.asarray(model(SOURCE, TARGET)), expected)


def test_export_rejects_a_model_with_a_removed_layer(port):
    model = build(port, num_encoder_layers=2)
    model.encoder.layers.pop()
    with pytest.raises(ValueError, match=r"the model has no encoder\.layers\.1\.self_attention\.query_proj"):
        model.export_weights()


# --- IDs, masks, and arguments of layers ---


@pytest.mark.parametrize(("wrong", "error"), [((3, 5, 5), ValueError), ((3, 1, 5, 4), ValueError), (int, TypeError)])
def test_attention_mask_is_validated_next_to_a_keras_mask(port, wrong, error):
    """A mask [B, L, M] would be broadcast over the wrong dimension, the heads."""
    import keras

    x = keras.layers.Masking()(np.random.default_rng(0).normal(size=(3, 5, CONFIG.d_model)).astype("float32"))
    layer = port.package.MultiHeadAttention(CONFIG)
    mask = np.ones((3, 1, 5, 5), int) if wrong is int else np.ones(wrong, bool)
    with pytest.raises(error, match=r"mask must (broadcast to|be boolean)"):
        layer(x, x, mask)


@pytest.mark.parametrize("kind", [list, np.array])
def test_padding_masks_can_be_lists(port, kind):
    np.testing.assert_array_equal(port.package.padding_mask(kind(SOURCE.tolist()), 0), SOURCE != 0)
    np.testing.assert_array_equal(port.package.target_padding_mask(kind(TARGET.tolist()), 0), TARGET != 0)


def test_ids_can_be_variables(port):
    import keras
    import tensorflow as tf

    model = build(port)
    expected = np.asarray(model(SOURCE, TARGET))
    for kind in (lambda ids: keras.Variable(ids, dtype="int32"), tf.Variable):
        assert_close(np.asarray(model(kind(SOURCE), kind(TARGET))), expected)
        with pytest.raises(ValueError, match=r"source_ids must be in \[0, 37\): got 100"):
            model(kind(SOURCE + 100), TARGET)


def test_prefixes_can_be_tensors(port):
    import tensorflow as tf

    model, prefix = build(port), np.array([[3, 4], [5, 0]])
    expected = port.package.greedy_search(model, SOURCE, 6, prefix_ids=prefix)
    for kind in (tf.constant, lambda rows: [tf.constant(row) for row in rows]):
        found = port.package.greedy_search(model, SOURCE, 6, prefix_ids=kind(prefix))
        np.testing.assert_array_equal(found.ids, expected.ids)


@pytest.mark.parametrize(
    "name", ["EncoderLayer", "DecoderLayer", "MultiHeadAttention", "PositionwiseFeedForward", "LayerNorm"]
)
@pytest.mark.parametrize("given", [8, CONFIG.to_dict()])
def test_layer_requires_a_config(port, name, given):
    with pytest.raises(TypeError, match=f"config must be a TransformerConfig: got {type(given).__name__}"):
        getattr(port.package, name)(given, 2)
