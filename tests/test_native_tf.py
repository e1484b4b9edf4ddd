"""What users of Keras and TensorFlow do with any model works with this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_same_bits
from test_native import SOURCE, TARGET, assert_close, build

import reference_numpy as ref
from reference_numpy import TrainingConfig, parameter_shapes

pytestmark = pytest.mark.only("tf")

LABELS = np.array([[3, 4, 2], [5, 2, 0]])
BATCH = SOURCE, TARGET, LABELS
SETTINGS = TrainingConfig(warmup_steps=4, learning_rate_factor=0.5)


def losses(trainer, steps=3):
    return [float(trainer.train_step(*BATCH).loss) for _ in range(steps)]


def moved(before, after):
    """Return which parts of a model are not what they were."""
    return {name.split(".")[0] for name, array in before.items() if not np.array_equal(after[name], array)}


@pytest.mark.parametrize("tie", ["target_output", "all"])
def test_a_tied_table_is_one_variable_in_two_places(port, tie, tmp_path):
    """Counted once, saved once, trained once."""
    import keras

    model = build(port, dtype="float32", tie_embeddings=tie)
    assert model.output_proj.embedding is model.target_embedding
    assert model.count_params() == ref.count_parameters(model.config)
    variables = model.trainable_variables
    assert len({id(variable) for variable in variables}) == len(variables) == len(ref.parameter_shapes(model.config))
    model.save(path := tmp_path / "model.keras")
    numbers = sum(path.stat().st_size for path in tmp_path.iterdir())
    loaded = keras.models.load_model(path)
    assert loaded.output_proj.embedding is loaded.target_embedding
    assert_same_bits(loaded.export_weights(), model.export_weights())
    assert numbers < 4 * ref.count_parameters(model.config) + 150_000


# --- Training ---


@pytest.mark.parametrize("slices", [1, 2])
def test_frozen_layers_stay_as_they_are(port, slices):
    """Their moments too, which a state has all the same; and from when on does not matter."""
    model = build(port)
    trainer = port.package.Trainer(model, TrainingConfig(**{**SETTINGS.to_dict(), "accumulation_steps": slices}))
    everywhere = {"source_embedding", "encoder", "decoder"}
    for frozen, expected in ((True, everywhere - {"encoder"}), (False, everywhere), (True, everywhere - {"encoder"})):
        model.encoder.trainable = not frozen
        before, state = model.export_weights(), trainer.export_state()
        losses(trainer)
        assert moved(before, model.export_weights()) == expected
        after = trainer.export_state()
        assert list(after.first_moment) == list(parameter_shapes(model.config))
        assert moved(state.first_moment, after.first_moment) == expected
        assert moved(state.second_moment, after.second_moment) == expected


def test_gradients_say_what_is_frozen(port):
    """Taps have theirs all the same, also where nothing before them is trained."""
    model = build(port)
    expected = port.package.gradients(model, *BATCH)
    model.encoder.trainable = model.source_embedding.trainable = False
    found = port.package.gradients(model, *BATCH)
    assert expected.frozen == ()
    assert found.frozen == tuple(name for name in expected.parameters if name.startswith(("encoder", "source")))
    assert [*found.parameters] == [name for name in expected.parameters if name not in found.frozen]
    assert [*found.taps] == [*expected.taps]
    for name, gradient in {**found.parameters, **found.taps}.items():
        assert_close(gradient, {**expected.parameters, **expected.taps}[name])


def test_fit_with_callbacks_leaves_frozen_layers_alone(port, tmp_path):
    import keras

    keras.utils.set_random_seed(0)
    model = build(port, dtype="float32")
    model.decoder.trainable = False
    before = model.export_weights()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(0.01), loss=loss)
    path = str(tmp_path / "best.weights.h5")
    callbacks = [
        keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True, save_weights_only=True),
        keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss"),
    ]
    history = model.fit((SOURCE, TARGET), LABELS, epochs=4, verbose=0, callbacks=callbacks).history["loss"]
    assert history[-1] < history[0]
    assert moved(before, model.export_weights()) == {"source_embedding", "encoder"}
    fresh = build(port, dtype="float32")
    fresh.load_weights(path)
    assert moved(fresh.export_weights(), before) == {"source_embedding", "encoder"}


# In a process of its own, which takes the CPU for two devices.
MIRRORED = """
import keras, numpy as np, tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import transformer_tf as port
from conftest import random_weights, tiny_config
from test_native_tf import BATCH

config = tiny_config(num_encoder_layers=1, num_decoder_layers=1, dropout={"embedding": 0.0, "residual": 0.0})
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

def trained(strategy):
    with strategy.scope():
        model = port.Transformer(config)
        optimizer = keras.optimizers.SGD(0.01)
    port.set_weights(model, random_weights(config))

    def replica(*batch):
        with tf.GradientTape() as tape:
            total, tokens = port.cross_entropy(model(*batch[:2], training=True), batch[2], config)
        optimizer.apply(tape.gradient(total, model.trainable_variables), model.trainable_variables)
        return total

    @tf.function
    def step(*batch):
        return strategy.reduce("SUM", strategy.run(replica, args=batch), axis=None)

    parts = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(BATCH).unbatch().batch(2).repeat(3))
    return model, [float(step(*part)) for part in parts]

(mirrored, losses), (alone, expected) = trained(strategy), trained(tf.distribute.get_strategy())
copies = mirrored.source_embedding.table.value.values
assert [copy.device[-1] for copy in copies] == ["0", "1"], copies
np.testing.assert_array_equal(*copies)
np.testing.assert_allclose(losses, expected, rtol=1e-5)
assert losses[-1] < 0.9 * losses[0]
for name, array in alone.export_weights().items():
    np.testing.assert_allclose(mirrored.export_weights()[name], array, rtol=1e-4, atol=1e-5)
"""


def test_training_under_a_mirrored_strategy():
    """Two copies of each variable, on two devices, learn what one learns."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", MIRRORED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
