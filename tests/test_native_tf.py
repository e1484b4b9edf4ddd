"""Common uses of Keras and TensorFlow models also work with this model."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import tiers
from conftest import assert_same_bits, random_weights, tiny_config
from native_models import BATCH, LABELS, SETTINGS, SOURCE, TARGET, assert_close, build, losses, run_alone

import reference_numpy as ref
from reference_numpy import TrainingConfig, count_parameters, parameter_shapes

pytestmark = pytest.mark.only("tf")


def moved(before, after):
    """Return the names of the parts of a model whose values changed."""
    return {name.split(".")[0] for name, array in before.items() if not np.array_equal(after[name], array)}


@pytest.mark.parametrize("tie", ["target_output", "all"])
def test_tied_embedding_is_a_single_variable(port, tie, tmp_path):
    """The tied matrix is counted, saved, and trained only once."""
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


@pytest.mark.parametrize("micro_batches", tiers.first_alone([1, 2], "training"))
def test_frozen_layers_keep_weights_and_moments(port, micro_batches):
    """A frozen layer's moments are exported but don't change, regardless of when the layer is frozen or unfrozen."""
    model = build(port)
    trainer = port.package.Trainer(model, TrainingConfig(**{**SETTINGS.to_dict(), "accumulation_steps": micro_batches}))
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


def test_frozen_parameters_have_no_moments(port):
    """Frozen parameters have moments only if they were trained before. Exported states contain zeros instead."""
    model = build(port)
    model.encoder.trainable = False
    trainer = port.package.Trainer(model, SETTINGS)
    losses(trainer)
    assert not [name for name in trainer.optimizer.first_moment if name.startswith("encoder")]
    state = trainer.export_state()
    again = port.package.Trainer(model, SETTINGS)
    again.load_state(state)
    assert [*again.optimizer.first_moment] == [*trainer.optimizer.first_moment]
    model.encoder.trainable = True
    losses(again, 1)
    assert set(again.optimizer.first_moment) == set(parameter_shapes(model.config))
    assert set(again.optimizer.second_moment) == set(parameter_shapes(model.config))


def test_gradients_list_frozen_parameters(port):
    """Gradients for taps are returned even if no parameter before the tap is trainable."""
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


def test_fit_with_callbacks_does_not_change_frozen_layers(port, tmp_path):
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


# Runs in a separate process in which TensorFlow treats the CPU as two devices.
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
copies = mirrored.source_embedding.table.embeddings.value.values
assert [copy.device[-1] for copy in copies] == ["0", "1"], copies
np.testing.assert_array_equal(*copies)
np.testing.assert_allclose(losses, expected, rtol=1e-5)
assert losses[-1] < 0.9 * losses[0]
for name, array in alone.export_weights().items():
    np.testing.assert_allclose(mirrored.export_weights()[name], array, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.extended("strategies")
def test_training_under_a_mirrored_strategy_matches_one_device():
    """A model whose variables are mirrored on two devices learns the same as a model on one device."""
    run_alone(MIRRORED)


def test_loading_a_model_does_not_initialize_weights(port, monkeypatch):
    import keras

    def draw(self, shape, dtype=None):
        raise AssertionError("an initial value is drawn")

    for initializer in (keras.initializers.GlorotUniform, keras.initializers.RandomNormal):
        monkeypatch.setattr(initializer, "__call__", draw)
    config = tiny_config(tie_embeddings="none", output_bias=True, position_encoding="learned")
    weights = random_weights(config)
    for device in (None, "cpu"):
        model = port.package.Transformer.from_weights(config, weights, device=device)
        assert_same_bits(model.export_weights(), weights)
    with pytest.raises(AssertionError, match="is drawn"):
        port.package.Transformer(config)


@pytest.mark.parametrize("what", ["model", "trainer", "mesh"])
def test_trainer_rejects_a_model_from_a_different_strategy_scope(port, what):
    """Variables have one copy per device, and the optimizer must update all of them."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["/CPU:0"])
    scopes = {name: strategy.scope() if name == what else nullcontext() for name in ("model", "trainer")}
    with scopes["model"]:
        model = port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG))
    with scopes["trainer"], pytest.raises(ValueError, match=r"^the model must be created in the scope"):
        port.package.Trainer(model, TrainingConfig(), mesh=strategy if what == "mesh" else None)


CONFIG = tiny_config(num_encoder_layers=1, num_decoder_layers=1)
IDS = {"source_ids": np.int32(SOURCE), "target_ids": np.int32(TARGET)}
POLICIES = ("float64", "float32", "bfloat16", "mixed_bfloat16")


def close(port, got, expected, tolerance=1e-6):
    np.testing.assert_allclose(port.to_numpy(got), port.to_numpy(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("policy", POLICIES)
def test_saving_and_loading_preserves_the_dtype_policy(port, policy, tmp_path):
    """Saving and loading preserves the policy and thus the dtype of the variables."""
    import keras

    model = port.package.Transformer(CONFIG, policy, name="translator")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.dtype_policy.name, loaded.name) == (policy, "translator")
    assert {variable.dtype for variable in loaded.trainable_variables} == {model.variable_dtype}
    assert_same_bits(loaded.export_weights(), model.export_weights())
    np.testing.assert_array_equal(port.to_numpy(loaded(SOURCE, TARGET)), port.to_numpy(model(SOURCE, TARGET)))


def test_tensorflow_checkpoint_restores_all_variables(port, tmp_path):
    """TensorFlow's checkpoint doesn't search lists of layers and would silently omit their variables."""
    import tensorflow as tf

    model, fresh = build(port), build(port)
    path = tf.train.Checkpoint(model=model).save(tmp_path / "model")
    port.package.set_weights(fresh, random_weights(model.config, seed=1))
    tf.train.Checkpoint(model=fresh).restore(path).assert_existing_objects_matched()
    assert_same_bits(fresh.export_weights(), model.export_weights())


def test_exported_weights_include_the_low_rank_adapter(port):
    """Keras adds the low-rank product to a kernel, and exported weights include the sum."""
    model, plain = build(port), build(port)
    port.package.greedy_search(model, SOURCE, 4)  # traces the model before the layer is changed
    layer = model.encoder.layers[0].self_attention.query_proj
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.ones([2, 24]))
    weights = model.export_weights()
    port.package.set_weights(plain, weights)
    close(port, plain(SOURCE, TARGET), model(SOURCE, TARGET), 1e-12)
    found, expected = (port.package.greedy_search(x, SOURCE, 4) for x in (model, plain))
    np.testing.assert_allclose(found.nbest_scores, expected.nbest_scores, rtol=1e-12)
    name = "encoder.layers.0.self_attention.query_proj.kernel"
    for refused in (
        lambda: port.package.set_weights(model, weights),
        lambda: port.package.gradients(model, *BATCH),
        lambda: port.package.Trainer(model, SETTINGS),
    ):
        with pytest.raises(ValueError, match=f"{name} must be a variable: got a sum"):
            refused()


def test_decode_step_does_not_modify_its_cache(port):
    model = build(port)
    empty = model.init_cache(SOURCE, 3)
    first, one = model.decode_step(TARGET[:, 0], empty)
    assert (int(empty.length), int(one.length)) == (0, 1)
    again, _ = model.decode_step(TARGET[:, 0], empty)
    np.testing.assert_array_equal(port.to_numpy(again), port.to_numpy(first))


def test_global_policy_is_the_default(port):
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        models = port.package.Transformer(CONFIG), port.package.EncoderStack(CONFIG)
        explicit = port.package.Transformer.from_weights(CONFIG, random_weights(CONFIG))
    finally:
        keras.config.set_dtype_policy(before)
    for model in models:
        assert {layer.dtype_policy.name for layer in model._flatten_layers()} == {"mixed_bfloat16"}
        assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    assert explicit.dtype_policy.name == "float32"
    assert models[0](SOURCE, TARGET).dtype == "bfloat16"


def symbolic(model, form):
    import keras

    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in IDS}
    outputs = {"arguments": lambda: model(*inputs.values()), "list": lambda: model([*inputs.values()])}
    return keras.Model(inputs, keras.layers.Softmax()(outputs.get(form, lambda: model(inputs))()))


@pytest.mark.parametrize("form", tiers.first_alone(["arguments", "list", "dict"], "forms"))
def test_functional_model_matches_and_round_trips(port, form, tmp_path):
    import keras

    model = build(port, dtype="float32")
    functional = symbolic(model, form)
    assert functional.output_shape == (None, None, 37)
    expected = keras.ops.softmax(model(SOURCE, TARGET))
    close(port, functional(IDS), expected)
    with pytest.raises(ValueError, match="target_ids must be in"):
        functional({**IDS, "target_ids": IDS["target_ids"] + 37})
    functional.save(tmp_path / "model.keras")
    close(port, keras.models.load_model(tmp_path / "model.keras")(IDS), expected)


@pytest.mark.parametrize("form", tiers.first_alone(["data", "dict with masks", "dict", "tuple", "functional"], "forms"))
def test_fit_evaluate_and_predict_accept_every_form_of_input(port, form):
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model = port.package.Transformer(CONFIG)
    assert model.count_params() == count_parameters(CONFIG)
    assert len(model.trainable_variables) == len(parameter_shapes(CONFIG))
    if form == "functional":
        inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in IDS}
        model = keras.Model(inputs, model(inputs))
    model.compile(
        optimizer=keras.optimizers.SGD(0.1), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    inputs = {"tuple": tuple(IDS.values()), "dict with masks": {**IDS, "source_mask": SOURCE != 0}}.get(form, IDS)
    if form == "data":
        data = tf.data.Dataset.from_tensor_slices((inputs, TARGET)).batch(2)
        losses = model.fit(data, epochs=6, shuffle=False, verbose=0).history["loss"]
        evaluated, predicted = model.evaluate(data, verbose=0), model.predict(data.map(lambda x, _: x), verbose=0)
    else:
        losses = model.fit(inputs, TARGET, epochs=6, verbose=0).history["loss"]
        evaluated, predicted = model.evaluate(inputs, TARGET, verbose=0), model.predict(inputs, verbose=0)
    assert evaluated < losses[-1] < 0.8 * losses[0]
    close(port, predicted, model(inputs), 1e-5)


@pytest.mark.extended("framework idioms")
def test_saved_model_runs_without_the_package(port, tmp_path):
    """A SavedModel runs without this package. Without a signature, Keras assumes that inputs are floats."""
    import keras
    import tensorflow as tf

    model = build(port, dtype="float32")
    expected = model(SOURCE, TARGET)
    spec = tf.TensorSpec([None, None], tf.int32)
    model.export(tmp_path / "own", input_signature=[spec, spec], verbose=False)
    loaded = tf.saved_model.load(tmp_path / "own")
    close(port, loaded.serve(*IDS.values()), expected, 1e-5)
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in IDS}
    keras.Model(inputs, model(inputs)).export(tmp_path / "functional", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "functional")
    close(port, loaded.serve(IDS), expected, 1e-5)
    traced = tf.function(lambda source_ids, target_ids: model(source_ids, target_ids), [spec, spec])
    tf.saved_model.save(model, tmp_path / "plain", traced)
    loaded = tf.saved_model.load(tmp_path / "plain")
    served = loaded.signatures["serving_default"](**{name: tf.constant(ids) for name, ids in IDS.items()})
    close(port, next(iter(served.values())), expected, 1e-5)


def test_every_layer_can_be_rebuilt_from_its_config(port):
    import keras

    model = port.package.Transformer(CONFIG.replace(tie_embeddings="none", output_bias=True), "mixed_bfloat16")
    layers = [
        model,
        *(layer for layer in model._flatten_layers() if type(layer).__module__.startswith("transformer_tf")),
    ]
    assert {type(layer).__name__ for layer in layers} > {"TokenEmbedding", "MultiHeadAttention", "LayerNorm"}
    for layer in layers:
        again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
        assert type(again) is type(layer)
        assert again.get_config() == layer.get_config()
        assert again.dtype_policy.name == "mixed_bfloat16"
        shapes = [[variable.shape for variable in of.variables] for of in (again, layer)]
        assert shapes[0] == shapes[1]


def test_encoder_layer_works_in_a_custom_keras_model(port, tmp_path):
    import keras

    x = keras.Input((None, 24))
    model = keras.Model(x, port.package.EncoderLayer(CONFIG)(x))
    model.save(tmp_path / "model.keras")
    values = np.random.default_rng(0).normal(size=(2, 5, 24)).astype("float32")
    close(port, keras.models.load_model(tmp_path / "model.keras")(values), model(values))


def test_summary_counts_parameters_and_clone_keeps_the_config(port, capsys):
    import keras

    model = build(port, dtype="float32")
    model.summary()
    assert f"{model.count_params():,}" in capsys.readouterr().out
    clone = keras.models.clone_model(model)
    assert clone.config == model.config
    clone.set_weights(model.get_weights())
    assert_same_bits(clone.export_weights(), model.export_weights())


@pytest.mark.extended("framework idioms")
def test_jit_compiled_predictions_match_the_plain_call(port):
    import keras

    model = build(port, dtype="float32")
    expected = model(SOURCE, TARGET)
    model.compile(jit_compile=True, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    close(port, model.predict(IDS, verbose=0), expected, 1e-5)
    assert np.isfinite(model.evaluate(IDS, TARGET, verbose=0))


# Runs in a separate process, because devices must be configured before TensorFlow starts.
PLACES = """
import numpy as np, tensorflow as tf
from conftest import random_weights, tiny_config
from reference_numpy import TrainingConfig
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
tf.config.set_soft_device_placement(False)
import transformer_tf as port
SOURCE, TARGET = np.array([[5, 6, 7, 36], [8, 9, 0, 0]]), np.array([[1, 3, 4], [1, 5, 0]])
config = tiny_config(num_encoder_layers=1, num_decoder_layers=1)
weights = random_weights(config)
before = tf.config.experimental.tensor_float_32_execution_enabled()

with tf.device("/CPU:1"):
    model = port.Transformer.from_weights(config, weights)
    assert {variable.value.device[-5:] for variable in model.variables} == {"CPU:1"}
    ids = tf.constant(SOURCE), tf.constant(TARGET)
    logits = model(*ids)
    cache = model.init_cache(SOURCE, 2)
    step, cache = model.decode_step(TARGET[:, 0], cache)
    for x in (model(SOURCE, TARGET), logits, step, *tf.nest.flatten(cache)):
        assert x.device[-5:] == "CPU:1", x.device
    found = port.greedy_search(model, SOURCE, max_length=3)
    trainer = port.Trainer(model, TrainingConfig(warmup_steps=10))
    trainer.train_step(SOURCE, TARGET, TARGET)
first = port.Transformer.from_weights(config, weights, device="cpu")
with tf.device("/CPU:1"):
    assert first(SOURCE, TARGET).device[-5:] == "CPU:0"
    assert {ids.device[-5:] for ids in port.training._take(first, SOURCE, TARGET, TARGET)} == {"CPU:0"}
    take, taken = port.Transformer._take, []
    port.Transformer._take = lambda *args: taken.append(take(*args)) or taken[-1]
    port.greedy_search(first, SOURCE, max_length=3)
    assert {x.device[-5:] for x in taken[0]} == {"CPU:0"}
    port.Transformer._take = take
np.testing.assert_array_equal(found.ids, port.greedy_search(first, SOURCE, max_length=3).ids)

strategy = tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
with strategy.scope():
    mirrored = port.Transformer.from_weights(config, weights)
assert isinstance(mirrored.source_embedding.table.embeddings.value, tf.distribute.DistributedValues)
both = strategy.run(lambda: mirrored(SOURCE, TARGET))
for part, place in zip(strategy.experimental_local_results(both), "01"):
    assert part.device.endswith(place), part.device
    np.testing.assert_allclose(part, logits, rtol=1e-5, atol=1e-5)
assert tf.config.experimental.tensor_float_32_execution_enabled() == before
port.Transformer.from_weights(config, weights, precision="highest")
assert not tf.config.experimental.tensor_float_32_execution_enabled()
"""


@pytest.mark.extended("devices")
def test_device_and_strategy_scopes_are_respected():
    run_alone(PLACES)


@pytest.mark.parametrize("form", [tuple, list, dict])
def test_mask_keyword_works_with_structured_inputs(port, form):
    """A mask passed by keyword is used for any structure of the IDs. Passing a mask twice is an error."""
    model, mask = build(port), np.array([[1, 0, 1, 1], [1, 1, 1, 0]], bool)  # differs from the padding mask
    inputs = IDS if form is dict else form(IDS.values())
    expected = port.to_numpy(model(SOURCE, TARGET, source_mask=mask))
    np.testing.assert_array_equal(port.to_numpy(model(inputs, source_mask=mask)), expected)
    assert (expected != port.to_numpy(model(inputs))).any()
    twice = {**IDS, "source_mask": mask} if form is dict else form([*IDS.values(), mask])
    with pytest.raises(TypeError, match=r"multiple values for.* 'source_mask'"):
        model(twice, source_mask=mask)


@pytest.mark.parametrize("source", [[[5, 6], [8, 9]], ([5, 6], [8, 9]), np.array([[5, 6], [8, 9]]), []])
def test_omitted_target_raises_an_error(port, source):
    """A list of source rows must not be mistaken for a list of arguments."""
    with pytest.raises(TypeError, match=r"target_ids must be given; call model"):
        build(port)(source)


def test_recomputed_layers_restore_only_dropout_seeds(port, monkeypatch):
    """Recomputing a layer restores only the seeds of dropout, not frozen weights."""
    import keras

    layer = port.package.EncoderLayer(CONFIG.replace(dropout={"residual": 0.5}))
    layer.feed_forward.trainable = False
    scope, kept = keras.StatelessScope, []

    def recorded(state, **options):
        kept.extend(state)
        return scope(kept, **options)

    monkeypatch.setattr(keras, "StatelessScope", recorded)
    layer.recomputed(np.ones((2, 4, 24), "float32"), mask=None, training=True)
    assert [variable.path for variable, _ in kept] == [layer.dropout.seed_generator.state.path]
