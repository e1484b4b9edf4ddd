"""Layers of transformer_tf behave like Keras layers: masks, names, quantization, policies, and errors."""

from __future__ import annotations

import re

import numpy as np
import pytest
from conftest import random_weights, tiny_config
from native_models import BATCH, LABELS, NO_DROPOUT, SETTINGS, SOURCE, TARGET, build, run_alone

pytestmark = [
    pytest.mark.only("tf"),
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning"),
]
CONFIG = tiny_config(num_encoder_layers=1, num_decoder_layers=1)


def random_vectors(length):
    return np.random.default_rng(0).normal(size=(1, length, 24)).astype("float32")


def marked(x, mask):
    """Return a tensor with a Keras mask, as ``Masking`` returns it."""
    import keras

    x = np.where(np.array(mask)[..., None], x, 0.0)
    return keras.layers.Masking()(x)


# --- Quantization, adapters, and replaced layers ---


@pytest.mark.parametrize("tie", ["all", "none"])
def test_quantize_changes_every_dense_layer_and_table(port, tie):
    import keras

    model = port.package.Transformer.from_weights(config := CONFIG.replace(tie_embeddings=tie), random_weights(config))
    expected = port.to_numpy(model(SOURCE, TARGET))
    model.quantize("int8")
    layers = [x for x in model._flatten_layers() if isinstance(x, keras.layers.Dense | keras.layers.Embedding)]
    assert len(layers) == 4 + 2 + 4 + 4 + 2 + (1 if tie == "all" else 3)
    assert {layer.quantization_mode for layer in layers} == {"int8"}
    found = port.to_numpy(model(SOURCE, TARGET))
    assert 0.0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    assert port.package.greedy_search(model, SOURCE, 4).ids.shape == (2, 4)


def test_exporting_a_quantized_model_is_rejected(port):
    model = build(port, dtype="float32")
    model.quantize("int8")
    for refused in (
        model.export_weights,
        lambda: port.package.gradients(model, *BATCH),
        lambda: port.package.Trainer(model, SETTINGS),
    ):
        with pytest.raises(ValueError, match=r"is quantized to int8.*before you call quantize"):
            refused()


def test_exporting_a_replaced_layer_is_rejected(port):
    import keras

    class Scaled(keras.layers.Dense):
        def call(self, inputs):
            return 2.0 * super().call(inputs)

    model = build(port)
    layer = model.encoder.layers[0].feed_forward
    layer._tracker.unlock()
    layer.inner_proj = Scaled(48)
    layer.inner_proj.build((None, 24))
    with pytest.raises(
        ValueError, match=r"encoder\.layers\.0\.feed_forward\.inner_proj must compute with .* only: got a Scaled"
    ):
        model.export_weights()


def test_export_rejects_parameters_without_a_canonical_name(port):
    import keras

    model = build(port)
    model.head = keras.layers.Dense(2, name="head")
    model.head.build((None, 37))
    for refused in (model.export_weights, lambda: port.package.gradients(model, *BATCH)):
        with pytest.raises(ValueError, match=r"head/kernel has no canonical name because .*; freeze the variable"):
            refused()
    model.head.trainable = False
    assert model.export_weights()


def test_exported_embeddings_include_the_low_rank_adapter(port):
    """Keras adds the low-rank product to the embedding matrix, even for a tied output, and exports the sum."""
    model, plain = build(port, tie_embeddings="all"), build(port, tie_embeddings="all")
    model.source_embedding.table.enable_lora(2)
    model.source_embedding.table.lora_embeddings_b.assign(np.ones([2, 24]))
    port.package.set_weights(plain, model.export_weights())
    expected = port.to_numpy(model(SOURCE, TARGET))
    np.testing.assert_allclose(port.to_numpy(plain(SOURCE, TARGET)), expected, rtol=1e-6, atol=1e-6)
    assert np.abs(expected - port.to_numpy(build(port, tie_embeddings="all")(SOURCE, TARGET))).max() > 0.1


# --- Names ---


def test_names_and_paths_are_the_same_in_every_model(port):
    config = CONFIG.replace(tie_embeddings="none", output_bias=True, position_encoding="learned", final_norm=True)
    config = config.replace(num_encoder_layers=2, num_decoder_layers=2)
    first, second = port.package.Transformer(config), port.package.Transformer(config)
    paths = [variable.path for variable in first.trainable_variables]
    assert paths == [variable.path for variable in second.trainable_variables]
    assert len(set(paths)) == len(paths)
    assert {
        "source_embedding/embeddings",
        "target_position/embeddings",
        "encoder/layer_0/self_attention/query/kernel",
        "encoder/layer_1/feed_forward_norm/gamma",
        "encoder/final_norm/beta",
        "decoder/layer_1/cross_attention/output/kernel",
        "decoder/layer_0/feed_forward/inner/bias",
        "output_proj/kernel",
        "output_proj/bias",
    } < set(paths)
    assert [layer.name for layer in first.layers] == [layer.name for layer in second.layers]
    assert first.get_layer("encoder") is first.encoder


# --- Masks ---


@pytest.mark.parametrize("kind", ["EncoderLayer", "EncoderStack"])
def test_encoder_layers_follow_the_mask_of_their_input(port, kind):
    import keras

    layer, x = getattr(port.package, kind)(CONFIG), random_vectors(4)
    expected = port.to_numpy(layer(x[:, :2]))
    mask = [[True, True, False, False]]
    everything = np.ones((1, 1, 4, 4), bool)
    for found in (
        layer(marked(x, mask)),
        layer(x, mask=np.array(mask)),
        layer(x, np.array(mask)[:, None, None]),
        layer(marked(x, mask), attention_mask=everything),
    ):
        np.testing.assert_allclose(port.to_numpy(found)[:, :2], expected, atol=1e-5)
    pooled = keras.layers.GlobalAveragePooling1D()(layer(marked(x, mask)))
    np.testing.assert_allclose(port.to_numpy(pooled), expected.mean(1), atol=1e-5)


def test_score_mask_is_passed_as_attention_mask(port):
    with pytest.raises(ValueError, match=r"mask must have shape \[batch, length\]: got \(1, 1, 4, 4\); pass masks of"):
        port.package.EncoderLayer(CONFIG)(random_vectors(4), mask=np.ones((1, 1, 4, 4), bool))


def test_layers_respect_the_mask_of_a_keras_embedding(port, tmp_path):
    import keras

    embedding = keras.layers.Embedding(50, 24, mask_zero=True)
    model = keras.Sequential([embedding, port.package.EncoderLayer(CONFIG), keras.layers.GlobalAveragePooling1D()])
    expected = port.to_numpy(model(np.array([[5, 6]])))
    np.testing.assert_allclose(port.to_numpy(model(np.array([[5, 6, 0, 0]]))), expected, atol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(port.to_numpy(loaded(np.array([[5, 6, 0, 0]]))), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["DecoderLayer", "DecoderStack"])
def test_decoder_layers_follow_the_masks_of_both_inputs(port, kind):
    layer, x, memory = getattr(port.package, kind)(CONFIG), random_vectors(3), random_vectors(5)
    expected = port.to_numpy(layer(x[:, :2], memory[:, :4]))
    masks = [[True, True, False]], [[True] * 4 + [False]]
    found = layer(marked(x, masks[0]), marked(memory, masks[1]))
    np.testing.assert_allclose(port.to_numpy(found)[:, :2], expected, atol=1e-5)
    explicit = np.array(masks[0])[:, None, None], np.array(masks[1])[:, None, None]
    np.testing.assert_allclose(port.to_numpy(layer(x, memory, *explicit))[:, :2], expected, atol=1e-5)
    causal = np.tri(3, dtype=bool)[None, None]
    both = layer(marked(x, masks[0]), marked(memory, masks[1]), causal)
    alone = layer(x[:, :2], memory[:, :4], causal[..., :2, :2])
    np.testing.assert_allclose(port.to_numpy(both)[:, :2], port.to_numpy(alone), atol=1e-5)


def test_attention_follows_the_mask_of_its_memory(port):
    layer, x = port.package.MultiHeadAttention(CONFIG), random_vectors(4)
    mask = [[True, True, True, False]]
    found = port.to_numpy(layer(x, marked(x, mask)))
    np.testing.assert_allclose(found, port.to_numpy(layer(x, x[:, :3])), atol=1e-5)
    np.testing.assert_allclose(
        found, port.to_numpy(layer(x, x, attention_mask=np.array(mask)[:, None, None])), atol=1e-5
    )


@pytest.mark.parametrize("form", ["eager", "functional", "source_mask", "functional source_mask"])
def test_pooling_after_an_encoder_ignores_padding(port, form):
    import keras

    encoder = port.package.Encoder.from_weights(CONFIG, random_weights(CONFIG))
    pool = keras.layers.GlobalAveragePooling1D()
    expected = port.to_numpy(encoder(np.array([[5, 6]]))).mean(1)
    if form == "functional":
        ids = keras.Input((None,), dtype="int32")
        found = keras.Model(ids, pool(encoder(ids)))(np.array([[5, 6, 0, 0]]))
    elif form == "functional source_mask":
        inputs = [keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="bool")]
        model = keras.Model(inputs, pool(encoder(*inputs)))
        found = model([np.array([[5, 6, 7, 8]]), np.array([[True, True, False, False]])])
    elif form == "eager":
        found = pool(encoder(np.array([[5, 6, 0, 0]])))
    else:
        found = pool(encoder(np.array([[5, 6, 7, 8]]), source_mask=np.array([[True, True, False, False]])))
    np.testing.assert_allclose(port.to_numpy(found), expected, atol=1e-5)


def test_source_mask_given_to_decode_overrides_the_memory_mask(port):
    """Keras attaches the mask of ``encode`` to the memory. Logits have no mask, because they belong to the target."""
    model = build(port)
    memory = model.encode(SOURCE)
    other = np.array([[1, 0, 1, 1], [1, 1, 1, 0]], bool)
    found = port.to_numpy(model.decode(TARGET, memory, source_mask=other))
    expected = model.decode(TARGET, port.to_numpy(memory), source_mask=other)
    np.testing.assert_array_equal(found, port.to_numpy(expected))
    assert getattr(model(SOURCE, TARGET), "_keras_mask", None) is None


def test_recomputed_layers_keep_the_mask_of_their_input(port):
    import tensorflow as tf

    stack, x = port.package.EncoderStack(CONFIG, "float64"), marked(random_vectors(4), [[True, True, False, False]])
    found = []
    for recompute in (False, True):
        stack.activation_checkpointing = recompute
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(stack(x)[:, :2] ** 2 * np.arange(24.0))
        found.append([tf.convert_to_tensor(g).numpy() for g in tape.gradient(y, stack.trainable_variables)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


# --- Policies and devices ---


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "mixed_bfloat16"])
def test_dtypes_and_policies_of_keras_are_accepted(port, name):
    import keras
    import ml_dtypes
    import tensorflow as tf

    given = [name, keras.DTypePolicy(name)]
    if not name.startswith("mixed"):
        given += [tf.as_dtype(name), np.dtype(getattr(ml_dtypes, name, name))]
        given += [given[-1].type]
    for dtype in given:
        model = port.package.Encoder.from_weights(CONFIG, random_weights(CONFIG), dtype)
        assert model.dtype_policy.name == name
        assert model.encoder.layers[0].feed_forward.inner_proj.dtype_policy.name == name


@pytest.mark.parametrize("place", ["cpu", "CPU", "CPU:0", "/CPU:0", "/device:CPU:0", "logical"])
def test_device_names_of_the_framework_are_accepted(port, place):
    import tensorflow as tf

    device = tf.config.list_logical_devices("CPU")[0] if place == "logical" else place
    model = port.package.Encoder.from_weights(CONFIG, random_weights(CONFIG), device=device)
    assert model.device == "/CPU:0"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float16"}, ValueError, "dtype must be one of float64, float32, bfloat16"),
        ({"dtype": 3}, ValueError, "dtype must be one of float64, float32, bfloat16"),
        ({"device": "abacus"}, ValueError, "device must be one of cpu, gpu"),
        ({"device": "cpu:x"}, ValueError, "device must be one of cpu, gpu"),
        ({"device": "cpu:7"}, RuntimeError, "no CPU:7 is visible"),
        ({"device": "gpu:7"}, RuntimeError, "no GPU"),
    ],
)
def test_unknown_dtypes_and_devices_raise_an_error(port, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        port.package.Encoder.from_weights(CONFIG, random_weights(CONFIG), **options)


# --- compile, fit, and save ---


def fitted(port, loss, smoothing=0.0, epochs=1):
    import keras

    model = port.package.Transformer.from_weights(
        config := CONFIG.replace(label_smoothing=smoothing, dropout=NO_DROPOUT), random_weights(config)
    )
    model.compile(keras.optimizers.SGD(0.1), loss(config))
    return model, model.fit((SOURCE, TARGET), LABELS, epochs=epochs, verbose=0).history["loss"]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_fit_works_with_the_cross_entropy_of_the_package(port, smoothing):
    model, losses = fitted(port, port.package.CrossEntropy, smoothing, epochs=5)
    fresh = port.package.Transformer.from_weights(model.config, random_weights(model.config))
    total, tokens = port.package.cross_entropy(fresh(SOURCE, TARGET), LABELS, model.config)
    np.testing.assert_allclose(losses[0], float(total) / int(tokens), rtol=1e-5)  # 5 tokens without padding
    assert losses[-1] < 0.8 * losses[0]


def test_fit_takes_the_same_step_as_the_gradient(port):
    model, _ = fitted(port, port.package.CrossEntropy, 0.1)
    before = random_weights(model.config)
    fresh = port.package.Transformer.from_weights(model.config, before)
    gradient = port.package.gradients(fresh, *BATCH).parameters
    for name, array in model.export_weights().items():
        np.testing.assert_allclose(array, before[name] - 0.1 * gradient[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda port: lambda config: port.package.cross_entropy,
        lambda port: lambda config: lambda y, p: port.package.cross_entropy(p, y, config)[0],
    ],
)
def test_passing_the_loss_function_suggests_the_loss_class(port, loss):
    with pytest.raises(TypeError, match=r"use loss=CrossEntropy\(model\.config\)"):
        fitted(port, loss(port))


def test_compiled_model_can_be_saved_and_loaded(port, tmp_path):
    import keras

    model, _ = fitted(port, port.package.CrossEntropy, 0.1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.loss.config == model.config
    evaluated = [one.evaluate((SOURCE, TARGET), LABELS, verbose=0) for one in (model, loaded)]
    np.testing.assert_allclose(*evaluated, rtol=1e-6)


@pytest.mark.parametrize("kind", ["Transformer", "Encoder"])
def test_saved_model_has_a_serving_signature(port, kind, tmp_path):
    import tensorflow as tf

    model = getattr(port.package, kind).from_weights(CONFIG, random_weights(CONFIG))
    inputs = {"source_ids": tf.constant(SOURCE, tf.int32), "target_ids": tf.constant(TARGET, tf.int32)}
    if kind == "Encoder":
        del inputs["target_ids"]
    tf.saved_model.save(model, tmp_path / "model")
    (found,) = tf.saved_model.load(tmp_path / "model").signatures["serving_default"](**inputs).values()
    np.testing.assert_allclose(found.numpy(), model(*inputs.values()).numpy(), rtol=1e-5, atol=1e-5)


# --- Errors ---


def test_invalid_token_id_inputs_raise_clear_errors(port):
    import keras
    import tensorflow as tf

    model, ragged = build(port), tf.ragged.constant([[5, 6, 2], [5, 2]])
    for call, error, message in (
        (lambda: model(SOURCE), TypeError, "target_ids must be given; call model(source_ids, target_ids)"),
        (lambda: model(target_ids=TARGET), TypeError, "source_ids must be given"),
        (lambda: model(ragged, TARGET), TypeError, "convert it with source_ids.to_tensor(config.pad_id)"),
        (lambda: model.encode(ragged), TypeError, "convert it with source_ids.to_tensor(config.pad_id)"),
        (
            lambda: model.encode(keras.Input((None,), dtype="int32")),
            TypeError,
            "supported only when you call a Transformer, Encoder, or Decoder",
        ),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call()


def test_search_inside_a_function_raises_an_error(port):
    import tensorflow as tf

    model = build(port)
    with pytest.raises(RuntimeError, match=r"must be called outside of tf\.function"):
        tf.function(lambda: port.package.greedy_search(model, SOURCE, 3).ids)()


WRONG_BACKEND = """
from conftest import tiny_config
import transformer_tf
for kind in ("Transformer", "EncoderLayer"):
    try:
        getattr(transformer_tf, kind)(tiny_config())
    except RuntimeError as error:
        print(error)
"""


def test_keras_with_another_backend_raises_an_error():
    said = run_alone(WRONG_BACKEND, KERAS_BACKEND="torch")
    assert said.splitlines() == 2 * ["KERAS_BACKEND must be tensorflow for transformer_tf: got torch"]


# --- Multiple tokens per step ---


@pytest.mark.parametrize("beam_size", [1, 2])
def test_decode_step_accepts_several_tokens(port, beam_size):
    """Decoding a prefix and then individual tokens works even if each hypothesis has a different prefix."""
    import tensorflow as tf

    model = build(port, position_encoding="learned")
    target = np.concatenate([TARGET, TARGET[:, ::-1]], 1)  # [2, 6], with padding between tokens
    target = np.repeat(target, beam_size, 0)
    target[0, 1] = 7
    source = np.repeat(SOURCE, beam_size, 0)
    expected = port.to_numpy(model(source, target))
    for step in (model.decode_step, tf.function(model.decode_step)):
        cache = model.init_cache(SOURCE, 6, beam_size)
        prefix, cache = step(tf.constant(target[:, :4]), cache)
        np.testing.assert_allclose(port.to_numpy(prefix), expected[:, :4], rtol=1e-9, atol=1e-9)
        for position in (4, 5):
            logits, cache = step(tf.constant(target[:, position]), cache)
            np.testing.assert_allclose(port.to_numpy(logits), expected[:, position], rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="all 6 positions are in use"):
        model.decode_step(target[:, 0], cache)
    cache = model.init_cache(SOURCE, 3, beam_size)
    with pytest.raises(ValueError, match=r"the cache must have room for 4 positions in total \(0 are in use\): got 3"):
        model.decode_step(target[:, :4], cache)
