"""Common uses of NumPy models also work with this model."""

from __future__ import annotations

import copy
import json
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config

import reference_numpy as ref
from reference_numpy import fast, functional
from reference_numpy.optimizer import Adam
from transformer_spec import DropoutRates, TrainingConfig, TransformerConfig, checks

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])
LABELS = np.array([[3, 4, 2], [5, 2, 0]])
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}


def build(dtype="float64", **overrides):
    config = tiny_config(**{**ONE_LAYER, **overrides})
    return ref.Transformer.from_weights(config, random_weights(config), dtype)


@pytest.mark.parametrize("tie", ["target_output", "all"])
@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_tied_embedding_is_a_single_array(tie, copied):
    model = copied(build(tie_embeddings=tie))
    assert model.output_proj.embedding is model.target_embedding
    expected, x = model(SOURCE, TARGET), np.ones((1, 1, 24))
    logits = model.output_proj(x)
    model.target_embedding.table *= 2.0
    np.testing.assert_allclose(model.output_proj(x), 2.0 * logits, rtol=1e-14)
    ref.set_weights(model, random_weights(model.config))
    np.testing.assert_array_equal(model(SOURCE, TARGET), expected)


# --- NumPy scalars and IDs, in every package ---


@pytest.mark.extended("dtypes", "jax", "tf")
def test_numpy_integers_are_accepted_as_integers(backend):
    sizes = {"d_model": np.int64(8), "num_heads": np.uint8(2), "d_ff": np.array(6), "max_length": np.int32(9)}
    config = tiny_config(**ONE_LAYER, **sizes, layer_norm_epsilon=np.float32(1e-6), label_smoothing=np.float64(0.1))
    assert type(config.d_model) is type(config.d_k) is type(config.d_ff) is int
    assert TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    model = backend.package.Transformer.from_weights(config, random_weights(config))
    cache = model.init_cache(SOURCE, np.int64(2), np.int32(2))
    logits, _ = model.decode_step(np.repeat(TARGET[:, 0], 2), cache)
    assert tuple(logits.shape) == (4, 37)
    limits = {"max_length": np.int64(3), "min_length": np.uint8(2), "start_id": np.int16(1)}
    found = backend.package.beam_search(model, SOURCE, beam_size=np.int64(2), length_penalty=np.float32(0.5), **limits)
    assert found.ids.shape[0] == 2


def test_numpy_numbers_in_settings_become_python_numbers():
    settings = TrainingConfig(warmup_steps=np.int64(7), beta1=np.float32(0.5), clip_norm=np.float64(1.0))
    assert (type(settings.warmup_steps), type(settings.beta1), type(settings.clip_norm)) == (int, float, float)
    assert TrainingConfig.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert type(DropoutRates(embedding=np.float32(0.5)).embedding) is float


@pytest.mark.parametrize("value", [True, np.True_, 1.0, np.float64(1.0), "1", None, np.ones(1)])
def test_check_integer_rejects_non_integers(value):
    with pytest.raises(TypeError, match=r"^size must be an integer: got "):
        checks.check_integer("size", value, minimum=0)


# --- Arrays of every kind, threads, and copies ---


class Tagged(np.ndarray):
    """An array subclass, like those used for units or labeled axes."""


def kinds_of(array, directory):
    """Yield arrays with the same values in the forms that programs commonly use."""
    yield "not contiguous", np.repeat(array, 2, axis=-1)[..., ::2]
    yield "of another order", np.asfortranarray(array)
    frozen = array.copy()
    frozen.flags.writeable = False
    yield "read-only", frozen
    file = directory / f"{len([*directory.iterdir()])}.npy"
    np.save(file, array)
    yield "memory-mapped", np.load(file, mmap_mode="r")
    yield "subclass", array.view(Tagged)


def test_arrays_of_every_kind_give_the_same_results(tmp_path):
    model, weights = build(), random_weights(tiny_config(**ONE_LAYER))
    masks = SOURCE != 0, TARGET != 0
    memory = model.encode(SOURCE)
    expected = model(SOURCE, TARGET, *masks), model.decode(TARGET, memory, SOURCE)
    given = (SOURCE, TARGET, *masks, memory)
    for forms in zip(*(list(kinds_of(array, tmp_path)) for array in given), strict=True):
        (kind, *_), (source, target, source_mask, target_mask, of_memory) = zip(*forms, strict=True)
        logits = model(source, target, source_mask, target_mask)
        assert type(logits) is np.ndarray, kind
        np.testing.assert_array_equal(logits, expected[0], err_msg=kind)
        np.testing.assert_array_equal(model.decode(target, of_memory, source), expected[1], err_msg=kind)
        for array, original in zip((source, target, source_mask, target_mask, of_memory), given, strict=True):
            np.testing.assert_array_equal(array, original, err_msg=kind)
    for number in range(5):
        of_kind = {name: list(kinds_of(array, tmp_path))[number][1] for name, array in weights.items()}
        twin = ref.Transformer.from_weights(model.config, of_kind, "float64")
        assert_same_bits(twin.export_weights(), model.export_weights())
        assert {type(array) for array in twin.export_weights().values()} == {np.ndarray}


def test_training_does_not_modify_its_inputs():
    weights = random_weights(tiny_config(**ONE_LAYER))
    for array in weights.values():
        array.flags.writeable = False
    trainer = ref.Trainer(
        ref.Transformer.from_weights(tiny_config(**ONE_LAYER), weights), TrainingConfig(warmup_steps=10)
    )
    trainer.train_step(SOURCE, TARGET, LABELS)
    state = trainer.export_state()
    for array in (*state.first_moment.values(), *state.second_moment.values()):
        array.flags.writeable = False
    trainer.load_state(state)
    trainer.train_step(SOURCE, TARGET, LABELS)


def test_copied_and_pickled_models_preserve_weights_and_ties():
    model = build()
    twin = pickle.loads(pickle.dumps(model))
    assert twin.source_embedding is twin.target_embedding
    np.testing.assert_array_equal(twin(SOURCE, TARGET), model(SOURCE, TARGET))


def test_threads_can_share_a_model():
    """Threads can run the same model at the same time with different sentences and lengths."""
    model, rng = build(), np.random.default_rng(0)
    batches = [rng.integers(3, 37, size=(2, length)) for length in rng.permutation(np.repeat(np.arange(2, 25), 4))]

    def run(source):
        found = ref.greedy_search(model, source, max_length=3)
        return model(source, source).sum(), found.scores.sum()

    expected = [run(batch) for batch in batches]
    fresh = build()
    model = fresh
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, batches)) == expected


def test_global_numpy_state_is_not_modified():
    """The model neither changes nor depends on NumPy's global random state and error handling."""
    before, handling = np.random.get_state()[1].copy(), np.geterr()
    for factor in (1, 20):  # large scores make probabilities underflow
        weights = {name: factor * array for name, array in random_weights(tiny_config()).items()}
        with np.errstate(all="raise"):
            model = ref.Transformer.from_weights(tiny_config(), weights)
            model(SOURCE, TARGET)
            ref.beam_search(model, SOURCE, max_length=3)
            ref.Trainer(model, TrainingConfig()).train_step(SOURCE, TARGET, LABELS)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    assert np.geterr() == handling


def test_fast_adam_matches_the_formulas_for_wide_rows():
    """A row can exceed the block size of fast Adam, for example in the output kernel of a large vocabulary."""
    rng, settings, taken = np.random.default_rng(0), TrainingConfig(), []
    start, gradient = ({"kernel": array} for array in rng.normal(size=(2, 3, fast.PIECE + 1)))
    for kind in (Adam, fast.FastAdam):
        optimizer = kind({"kernel": start["kernel"].copy()}, settings)
        for step in (1, 2):
            optimizer.update({"kernel": gradient["kernel"].copy()}, 0.5, 0.1, settings.bias_corrections(step))
        taken.append(optimizer)
    plain, ours = taken
    for name in ("parameters", "first_moment", "second_moment"):
        np.testing.assert_allclose(getattr(ours, name)["kernel"], getattr(plain, name)["kernel"], rtol=1e-12)
    assert not np.array_equal(ours.parameters["kernel"], start["kernel"])


# --- Common bugs of NumPy users ---


@pytest.mark.parametrize("fast", [False, True])
def test_layer_norm_promotes_a_float32_input_to_the_dtype_of_its_parameters(fast):
    config = tiny_config(**ONE_LAYER)
    model = ref.Transformer.from_weights(config, random_weights(config), "float64", fast=fast)
    norm = model.encoder.layers[0].feed_forward_norm
    x = np.ones((1, 2, 24), np.float32)
    assert norm(x).dtype == norm.backward(x, x, lambda name, value: value).dtype == np.float64


def test_gelu_of_integers_returns_floats():
    x = np.arange(-3, 4)
    np.testing.assert_array_equal(functional.gelu(x), functional.gelu(x.astype(float)))
    assert functional.gelu(1.0) == functional.gelu(np.ones(1))[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cross_entropy_of_half_precision_logits_is_computed_in_float32(dtype):
    rng, config = np.random.default_rng(0), tiny_config()
    logits, labels = rng.normal(size=(30, 1000, 37)).astype(dtype), rng.integers(3, 37, (30, 1000))
    found, tokens = ref.cross_entropy(logits, labels, config)
    expected, _ = ref.cross_entropy(logits.astype(np.float32), labels, config)
    assert (found.dtype, found, tokens) == (np.float32, expected, 30_000)


def test_ids_in_a_narrow_dtype_are_padded_with_a_larger_id():
    special = {"pad_id": 257, "bos_id": 256, "eos_id": 258}
    model = build(**{f"{side}_vocab_size": 260 for side in ("source", "target")}, **special, dropout=DropoutRates())
    ids = np.random.default_rng(0).integers(97, 120, (3, 5))
    found, expected = (
        ref.Trainer(model, TrainingConfig(), mesh=ref.Plan(data=2)).gradient(*[ids.astype(dtype)] * 3)
        for dtype in (np.uint8, np.int64)
    )
    assert found.loss == expected.loss
    found, expected = (ref.score(model, x, x).tokens for x in (ids.astype(np.uint8), ids))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("optimizer", [Adam, fast.FastAdam])
def test_optimizer_leaves_the_gradient_unchanged(optimizer):
    gradient = {"kernel": np.ones((2, 3))}
    optimizer({"kernel": np.zeros((2, 3))}, TrainingConfig()).update(gradient, 0.5, 0.1, (0.1, 0.02))
    assert (gradient["kernel"] == 1).all()


@pytest.mark.parametrize("rate", [50, 1.0, -0.1])
def test_dropout_rejects_a_rate_outside_its_range(rate):
    with pytest.raises(ValueError, match=re.escape(f"rate must be in [0, 1): got {rate}")):
        ref.Dropout(rate)


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), "f4", ">f4", "single", np.zeros(1, "f").dtype])
def test_every_spelling_of_a_dtype_is_accepted(dtype):
    config = tiny_config(**ONE_LAYER)
    built = ref.Transformer(config, dtype), ref.Transformer.from_weights(config, random_weights(config), dtype)
    assert {array.dtype for model in built for array in model.export_weights().values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("dtype", [np.float16, np.int32, "int32", "bfloat16", "half-precision", None, 4, {"f": 4}])
def test_unsupported_dtype_raises_value_error(dtype):
    for build_it in (ref.Transformer, lambda config, dtype: build(dtype)):
        with pytest.raises(ValueError, match=r"^dtype must be one of float64, float32: got "):
            build_it(tiny_config(**ONE_LAYER), dtype)


def test_repr_shows_sizes_dtype_and_number_of_parameters():
    model = build("float32")
    count = sum(array.size for array in model.export_weights().values())
    assert repr(model).startswith("Transformer(source_vocab_size=37, target_vocab_size=37, d_model=24, num_heads=")
    assert repr(model).endswith(f"num_encoder_layers=1, num_decoder_layers=1): {count:,} parameters in float32")
    encoder = ref.Encoder(model.config, np.float64)
    assert repr(encoder).startswith("Encoder(")
    assert f" {sum(array.size for array in encoder.export_weights().values()):,} parameters in float64" in repr(encoder)


@pytest.mark.parametrize("rng", [0, True, np.random.RandomState(0), np.random])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_rng_must_be_a_numpy_generator(rng, rate):
    model = build(dropout=dict.fromkeys(("embedding", "attention", "residual", "feed_forward"), rate))
    for call in (lambda: model(SOURCE, TARGET, rng=rng), lambda: model.encoder(model.encode(SOURCE), rng=rng)):
        with pytest.raises(TypeError, match=r"^rng must be a numpy\.random\.Generator: got .*default_rng\(seed\)"):
            call()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "swish"])
def test_underflow_of_probabilities_raises_no_error(activation, dtype, fast):
    config = tiny_config(**ONE_LAYER, activation=activation)
    weights = {name: 20 * array for name, array in random_weights(config).items()}
    weights["encoder.layers.0.feed_forward.inner_proj.bias"][:] = -1e-300  # underflows in float32
    rules = ref.SearchRules(no_repeat_ngram_size=2, renormalize=True)
    with np.errstate(all="raise"):
        model = ref.Transformer.from_weights(config, weights, dtype, fast=fast)
        logits = model(SOURCE, TARGET)
        ref.cross_entropy(logits, LABELS, config)
        ref.gradients(model, SOURCE, TARGET, LABELS)
        trainer = ref.Trainer(model, TrainingConfig())
        trainer.train_step(SOURCE, TARGET, LABELS)
        trainer.gradient(SOURCE, TARGET, LABELS)
        trainer.evaluate(SOURCE, TARGET, LABELS)
        ref.greedy_search(model, SOURCE, max_length=3)
        ref.beam_search(model, SOURCE, max_length=3, rules=rules)
        model.encoder.layers[0](model.encode(SOURCE))
        big = np.full((1, 1, 2, 4), 1e3, dtype) * np.array([[1], [-1]], dtype)
        ref.scaled_dot_product_attention(big, big, big)


def test_masked_memory_and_labels_are_rejected():
    model, remedy = build(), r"must be a plain array: got a masked array; call \.filled\(value\) first$"
    with pytest.raises(TypeError, match=f"^memory {remedy}"):
        model.decode(TARGET, np.ma.array(model.encode(SOURCE)), SOURCE)
    with pytest.raises(TypeError, match=f"^labels {remedy}"):
        ref.gradients(model, SOURCE, TARGET, np.ma.masked_equal(LABELS, 0))


def test_object_of_another_type_is_rejected_as_model():
    weights = build().export_weights()
    for call in (
        lambda: ref.gradients(weights, SOURCE, TARGET, LABELS),
        lambda: ref.Trainer(ref.Encoder(tiny_config()), TrainingConfig()),
    ):
        with pytest.raises(TypeError, match=r"^model must be a Transformer: got (dict|Encoder)$"):
            call()


def test_assigned_array_is_used_exported_and_trained():
    model = build()
    trainer = ref.Trainer(model, TrainingConfig(warmup_steps=10))
    layer, table = model.encoder.layers[0].feed_forward.inner_proj, np.full((37, 24), 0.5)
    layer.kernel, model.source_embedding.table = np.zeros_like(layer.kernel), table
    assert not model.export_weights()["encoder.layers.0.feed_forward.inner_proj.kernel"].any()
    before = model(SOURCE, TARGET)
    trainer.train_step(SOURCE, TARGET, LABELS)
    assert layer.kernel.any()
    assert not np.array_equal(model(SOURCE, TARGET), before)


def test_export_rejects_layer_counts_that_contradict_the_config():
    for change, found in ((lambda layers: layers.pop(), 1), (lambda layers: layers.append(layers[0]), 3)):
        model = build(num_encoder_layers=2)
        change(model.encoder.layers)
        with pytest.raises(ValueError, match=f"^encoder.layers must have 2 layers, as in the config: got {found}$"):
            model.export_weights()


def test_swapped_arguments_raise_type_error():
    model, weights = build(), random_weights(tiny_config(**ONE_LAYER))
    mapping = "must be a mapping of names to arrays, as returned by export_weights(): got"
    for function, arguments, message in (
        (ref.set_weights, (weights, model), "model must be a Model: got dict"),
        (ref.get_weights, (ref.Trainer(model, TrainingConfig()),), "model must be a Model: got Trainer"),
        (ref.set_weights, (model, [*weights.values()]), f"weights {mapping} list"),
        (ref.save_weights, ("model.safetensors", model.config, model), f"weights {mapping} Transformer"),
        (ref.cross_entropy, (np.ones((2, 3, 37)), LABELS, {}), "config must be a TransformerConfig: got dict"),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
            function(*arguments)
    logits = model(SOURCE, TARGET)
    assert ref.cross_entropy(logits.tolist(), LABELS, model.config) == ref.cross_entropy(logits, LABELS, model.config)


def test_training_a_model_without_weights_is_rejected():
    """All matrices of such a model are zero, and some gradients would remain zero."""
    message = r"^the model has no weights yet; call set_weights\(model, init_weights\(config, seed\)\) first$"
    with pytest.raises(ValueError, match=message):
        ref.Trainer(ref.Transformer(tiny_config()), TrainingConfig())


@pytest.mark.parametrize("quick", [True, False])
def test_changed_settings_apply_to_the_next_step(quick):
    config, changed = tiny_config(), TrainingConfig(beta1=0.5, beta2=0.9, epsilon=1e-3, clip_norm=0.1)
    trainers = [
        ref.Trainer(
            ref.Transformer.from_weights(config, random_weights(config), "float64", fast=quick), TrainingConfig()
        )
        for _ in range(2)
    ]
    for trainer in trainers:
        trainer.train_step(SOURCE, TARGET, LABELS)
    trainers[0].settings = changed
    resumed = ref.Trainer(trainers[1].model, changed)
    resumed.load_state(trainers[1].export_state())
    for trainer in (trainers[0], resumed):
        trainer.train_step(SOURCE, TARGET, LABELS)
    assert_same_bits(trainers[0].model.export_weights(), resumed.model.export_weights())
