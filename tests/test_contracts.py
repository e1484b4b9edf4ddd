"""Every backend rejects invalid input before computing, with the same message, and leaves valid input unchanged."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import tiers
from conftest import random_weights, refusal, tiny_config

from reference_numpy import Recorder

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])
MEMORY = np.full((2, 4, 24), 0.5, np.float32)
LONG = 300  # number of queries; above 256, fast attention computes them in blocks
FOUR_AXES = "a mask must have four axes: batch, heads, queries, keys"
BOOLEAN = "must be boolean, True where attention is allowed"
RAGGED = "must have rows of equal length: got different lengths; pad the rows"

# Invalid IDs, the exception, and its message after the argument's name. The model has 29 learned positions.
BAD_IDS = {
    "negative": ([[5, -6], [1, 2]], ValueError, "must be in [0, 37): got -6 at [0, 1]"),
    "too large": ([[5, 3], [37, 2]], ValueError, "must be in [0, 37): got 37 at [1, 0]"),
    "beyond int32": ([[5, 2**32 + 5], [1, 2]], ValueError, "must be in [0, 37): got 4294967301 at [0, 1]"),
    "float": ([[5.0, 3.0], [1.0, 2.0]], TypeError, "must be integers: got float64"),
    "bool": ([[True, False], [True, True]], TypeError, "must be integers: got bool"),
    "complex": ([[1j, 2.0], [1.0, 2.0]], TypeError, "must be integers: got complex128"),
    "rank 0": (3, ValueError, "must have shape [batch, length]: got ()"),
    "rank 1": ([1, 2], ValueError, "must have shape [batch, length]: got (2,)"),
    "rank 3": ([[[1], [2]]], ValueError, "must have shape [batch, length]: got (1, 2, 1)"),
    "empty batch": (np.zeros((0, 3), int), ValueError, "must contain at least one token: got shape (0, 3)"),
    "length 0": (np.zeros((2, 0), int), ValueError, "must contain at least one token: got shape (2, 0)"),
    "too long": (np.ones((2, 30), int), ValueError, "must be at most 29 tokens long: got 30"),
}
# Only lists and NumPy arrays can store these values.
BAD_OBJECTS = {
    "empty list": ([], ValueError, "must contain at least one token: got shape (0,)"),
    "ragged": ([[1, 2], [3]], ValueError, RAGGED),
    "text": ([["a", "b"]], TypeError, "must be integers: got str32"),
    "beyond every integer type": ([[1, 2**70]], TypeError, "must be integers: got object"),
    "nothing": (None, TypeError, "must be integers: got object"),
}
BAD_MASKS = {
    "float64": ([[1.0, 1.0, 1.0, 0.0]] * 2, TypeError, f"{BOOLEAN}: got float64"),
    "float32": (np.ones((2, 4), np.float32), TypeError, f"{BOOLEAN}: got float32"),
    "integers": ([[1, 1, 1, 0]] * 2, TypeError, f"{BOOLEAN}: got int64"),
    "too short": (np.ones((2, 3), bool), ValueError, "must have shape (2, 4): got (2, 3)"),
    "one row": (np.ones((1, 4), bool), ValueError, "must have shape (2, 4): got (1, 4)"),
    "rank 4": (np.ones((2, 1, 1, 4), bool), ValueError, "must have shape (2, 4): got (2, 1, 1, 4)"),
}
BAD_MASK_OBJECTS = {
    "objects": (np.ones((2, 4), object), TypeError, f"{BOOLEAN}: got object"),
    "text": ([["a", "b", "c", "d"]] * 2, TypeError, f"{BOOLEAN}: got str32"),
    "ragged": ([[True], [True, False]], ValueError, RAGGED),
}
BAD_MEMORIES = {
    "too short": (MEMORY[:, :3], "got (2, 3, 24)"),
    "one sentence": (MEMORY[:1], "got (1, 4, 24)"),
    "too narrow": (MEMORY[:, :, :23], "got (2, 4, 23)"),
    "rank 2": (MEMORY[0], "got (4, 24)"),
}


@pytest.fixture(scope="module")
def model(backend):
    config = tiny_config(position_encoding="learned", num_encoder_layers=1, num_decoder_layers=1)
    return backend.package.Transformer.from_weights(config, random_weights(config))


@pytest.fixture
def nothing_runs(backend, monkeypatch):
    """Fail if a computation begins, because invalid arguments must be rejected before that."""

    def begin(*args, **kwargs):
        raise AssertionError("a computation began before the arguments were checked")

    for part in ("TokenEmbedding", "EncoderStack", "DecoderStack"):
        monkeypatch.setattr(getattr(backend.package, part), "__call__", begin)


def forms(backend, value, *, native=True):
    """Return a value in the forms that callers pass: unchanged, as a NumPy array, and as the framework's array."""
    return [value, np.asarray(value), backend.from_numpy(np.asarray(value))] if native else [value]


@pytest.mark.parametrize("case", [*BAD_IDS, *BAD_OBJECTS])
def test_invalid_ids_are_rejected(backend, model, nothing_runs, case):
    value, kind, message = {**BAD_IDS, **BAD_OBJECTS}[case]
    memory = backend.from_numpy(MEMORY)
    for ids in forms(backend, value, native=case in BAD_IDS):
        for name, function, args in (
            ("source_ids", model, (ids, TARGET)),
            ("source_ids", model.encode, (ids,)),
            # A mask can replace the source IDs.
            *([("source_ids", model.decode, (TARGET, memory, ids))] if value is not None else []),
            ("target_ids", model, (SOURCE, ids)),
            ("target_ids", model.decode, (ids, memory, SOURCE)),
        ):
            expected = (kind, f"{name} {message}") if message else refusal(np.asarray, value)
            assert refusal(function, *args) == expected, f"{name} as {type(ids).__name__}"


@pytest.mark.parametrize("case", [*BAD_MASKS, *BAD_MASK_OBJECTS])
def test_invalid_masks_are_rejected(backend, model, nothing_runs, case):
    value, kind, message = {**BAD_MASKS, **BAD_MASK_OBJECTS}[case]
    memory = backend.from_numpy(MEMORY)
    for mask in forms(backend, value, native=case in BAD_MASKS):
        for name, function, args in (
            ("source_mask", model, (SOURCE, TARGET, mask)),
            ("source_mask", model.encode, (SOURCE, mask)),
            ("source_mask", model.decode, (TARGET, memory, SOURCE, None, mask)),
            ("target_mask", model, (TARGET, SOURCE, None, mask)),
            ("target_mask", model.decode, (SOURCE, memory, SOURCE, mask)),
        ):
            expected = (kind, f"{name} {message}") if message else refusal(np.asarray, value)
            assert refusal(function, *args) == expected, f"{name} as {type(mask).__name__}"


@pytest.mark.parametrize("case", BAD_MEMORIES)
def test_invalid_memory_is_rejected(backend, model, nothing_runs, case):
    value, got = BAD_MEMORIES[case]
    for memory in (value, backend.from_numpy(value)):
        expected = (ValueError, f"memory must have shape (2, 4, 24): {got}")
        assert refusal(model.decode, TARGET, memory, SOURCE) == expected


def test_different_batch_sizes_of_source_and_target_are_rejected(backend, model, nothing_runs):
    expected = (ValueError, "source_ids and target_ids must have the same batch size: got 2 and 1")
    memory = backend.from_numpy(MEMORY)
    for target in forms(backend, TARGET[:1]):
        assert refusal(model, SOURCE, target) == expected
        assert refusal(model.decode, target, memory, SOURCE) == expected


def test_masked_arrays_are_rejected(backend, model, nothing_runs):
    """Frameworks would drop a NumPy mask, so the model would read the masked values."""
    ids, mask = np.ma.masked_equal(SOURCE, 0), np.ma.array(SOURCE != 0, mask=SOURCE == 0)
    for name, arguments in (("source_ids", (ids, TARGET)), ("source_mask", (SOURCE, TARGET, mask))):
        message = f"{name} must be a plain array: got a masked array; call .filled(value) first"
        assert refusal(model, *arguments) == (TypeError, message)
    name, array = next(iter(random_weights(model.config).items()))
    weights = {**random_weights(model.config), name: np.ma.array(array)}
    message = f"{name} must be a plain array: got a masked array; call .filled(value) first"
    assert refusal(backend.package.Transformer.from_weights, model.config, weights) == (TypeError, message)


def test_config_or_settings_given_as_a_dict_raise_type_error(backend, model):
    options = {"rngs": None} if backend.name == "jax" else {}
    build, train = backend.package.Transformer, backend.package.Trainer
    message = "config must be a TransformerConfig: got dict; write TransformerConfig(**config)"
    assert refusal(build, tiny_config().to_dict(), **options) == (TypeError, message)
    assert refusal(build.from_weights, {}, random_weights(tiny_config())) == (TypeError, message)
    message = "config must be a TransformerConfig: got int"
    assert refusal(build, config=512, **options) == (TypeError, message)
    message = "settings must be a TrainingConfig: got dict; write TrainingConfig(**settings)"
    assert refusal(train, model, {"warmup_steps": 3}) == (TypeError, message)


def test_tap_without_return_raises_type_error(backend, model):
    shown = []
    for tap, first in ((lambda name, value: shown.append(name), "source_embedding.output"), (only_scores, "logits")):
        message = (
            f"the tap must return the value of {first}, or an array with the same number of axes: got NoneType; end "
            "the tap with "
            "`return value`"
        )
        kind, said = refusal(model, SOURCE, TARGET, tap=tap)  # Keras appends the arguments of the call to the message
        assert kind is TypeError
        assert message in said
    message = (
        "the tap must return the value of target_embedding.output, or an array with the same number of axes: got "
        "NoneType; end the tap with `return value`"
    )
    cache = model.init_cache(SOURCE, 3)
    assert refusal(model.decode_step, [1, 1], cache, tap={}) == (
        TypeError,
        "tap must be a function of a name and a value: got dict",
    )
    assert refusal(model.decode_step, [1, 1], cache, tap=lambda name, value: None) == (TypeError, message)


def only_scores(name, value):
    """Return every value except the logits."""
    if name != "logits":
        return value


def test_missing_target_raises_type_error(model):
    """Keras passes source and target as one tuple; a source array isn't such a tuple, regardless of its batch size."""
    assert refusal(model, SOURCE)[0] is TypeError


@cache
def attentions(backend):
    """Return the attention functions of a fast model and of a model that uses the formulas."""
    config = tiny_config(num_encoder_layers=1, num_decoder_layers=1)
    fast, plain = (
        backend.package.Transformer.from_weights(config, random_weights(config), fast=fast) for fast in (True, False)
    )
    return [model.encoder.layers[0].self_attention.attend for model in (fast, plain)]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, 5, 11), (2, 3, 7, 13), (2, 3, 7, 13)), "query and key must have the same d_k: got 11 and 13"),
        (((2, 3, 5, 11), (2, 3, 7, 11), (2, 3, 5, 13)), "key and value must have the same length: got 7 and 5"),
        (((2, 3, 5, 11), (1, 3, 7, 11), (1, 3, 7, 13)), "query and key must have the same batch size: got 2 and 1"),
        (
            ((2, 3, 5, 11), (2, 1, 7, 11), (2, 3, 7, 13)),
            "query and key must have the same number of heads: got 3 and 1",
        ),
        (
            ((2, 3, 5, 11), (2, 3, 7, 11), (2, 1, 7, 13)),
            "key and value must have the same number of heads: got 3 and 1",
        ),
        (((3, 5, 11), (3, 7, 11), (3, 7, 13)), "query must have shape [batch, heads, length, size]: got (3, 5, 11)"),
        (((2, 3, 5, 11), (2, 3, 7, 11), (7, 13)), "value must have shape [batch, heads, length, size]: got (7, 13)"),
    ],
)
def test_incompatible_attention_operands_raise_value_error(backend, shapes, message):
    for length in (5, LONG):
        query, key, value = shapes
        operands = [backend.from_numpy(np.ones(shape)) for shape in ((*query[:-2], length, query[-1]), key, value)]
        for attend in attentions(backend):
            expected = (ValueError, message.replace("(3, 5, 11)", f"(3, {length}, 11)"))
            assert refusal(attend, *operands) == expected
            assert refusal(attend, *operands, tap=Recorder()) == expected


@pytest.mark.parametrize(
    ("mask", "kind", "message"),
    [
        (np.ones((2, 3, 5, 7)), TypeError, f"mask {BOOLEAN}: got float64"),
        (np.ones((2, 3, 5, 7), np.int32), TypeError, f"mask {BOOLEAN}: got int32"),
        (np.ones((2, 1, 7, 5), bool), ValueError, "mask must broadcast to (2, 3, 5, 7): got (2, 1, 7, 5)"),
        (np.ones((5, 7), bool), ValueError, f"mask must broadcast to (2, 3, 5, 7): got (5, 7); {FOUR_AXES}"),
        (np.ones((2, 5, 7), bool), ValueError, f"mask must broadcast to (2, 3, 5, 7): got (2, 5, 7); {FOUR_AXES}"),
    ],
)
def test_invalid_attention_mask_is_rejected(backend, mask, kind, message):
    mask = backend.from_numpy(mask)
    for length in (5, LONG):
        shapes = (2, 3, length, 11), (2, 3, 7, 11), (2, 3, 7, 13)
        operands = [backend.from_numpy(np.ones(shape)) for shape in shapes]
        for attend in attentions(backend):
            expected = (kind, message.replace("(2, 3, 5, 7)", f"(2, 3, {length}, 7)"))
            assert refusal(attend, *operands, mask) == expected
            assert refusal(attend, *operands, mask, tap=Recorder()) == expected


def test_unknown_dtype_device_and_precision_are_rejected(backend):
    config = tiny_config()
    weights = random_weights(config)
    dtypes = "float64, float32" if backend.name == "numpy" else "float64, float32, bfloat16"
    devices = {"numpy": "cpu", "jax": "cpu, gpu, tpu"}.get(backend.name, "cpu, gpu")
    for options, message in (
        ({"dtype": "float16"}, f"dtype must be one of {dtypes}: got 'float16'"),
        ({"device": "npu"}, f"device must be one of {devices}: got 'npu'"),
        ({"precision": "high"}, "precision must be one of highest, fast: got 'high'"),
    ):
        assert refusal(backend.package.Transformer.from_weights, config, weights, **options) == (ValueError, message)
    assert refusal(backend.package.set_precision, "low")[0] is ValueError


def test_unavailable_gpu_raises(backend, monkeypatch):
    expected = (ValueError, "device must be one of cpu: got 'gpu'")
    if backend.name == "torch":
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        expected = (RuntimeError, f"no GPU is visible to torch {torch.__version__}")
    elif backend.name == "jax":
        import jax

        monkeypatch.setattr(backend.package.runtime, "_gpus", list)
        expected = (RuntimeError, f"no GPU is visible to jax {jax.__version__}")
    elif backend.name == "tf":
        import tensorflow as tf

        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
        expected = (RuntimeError, f"no GPU is visible to tensorflow {tf.__version__}")
    config = tiny_config()
    build = backend.package.Transformer.from_weights
    assert refusal(build, config, random_weights(config), device="gpu") == expected


# --- Accepted input ---


@pytest.mark.parametrize(
    "dtype",
    tiers.first_alone(
        ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "list"], "dtypes", "jax", "tf"
    ),
)
def test_ids_of_every_integer_type_give_the_same_logits(backend, model, dtype):
    expected = backend.to_numpy(model(SOURCE, TARGET))
    if dtype == "list":
        np.testing.assert_array_equal(backend.to_numpy(model(SOURCE.tolist(), TARGET.tolist())), expected)
        return
    source, target = SOURCE.astype(dtype), TARGET.astype(dtype)
    native = backend.from_numpy(source), backend.from_numpy(target)
    np.testing.assert_array_equal(backend.to_numpy(model(*native)), expected)
    np.testing.assert_array_equal(backend.to_numpy(model(source[:, ::-1], target)), _reversed(backend, model))
    source.flags.writeable = target.flags.writeable = False
    np.testing.assert_array_equal(backend.to_numpy(model(source, target)), expected)


def _reversed(backend, model):
    """Return the logits for the reversed source, passed as a contiguous array instead of a view."""
    return backend.to_numpy(model(np.ascontiguousarray(SOURCE[:, ::-1]), TARGET))


def test_masks_are_accepted_as_lists_and_arrays(backend, model):
    masks = [[True, False, True, True], [True, True, False, False]], [[True, True, False], [True, True, True]]
    arrays = [np.array(mask) for mask in masks]
    expected = backend.to_numpy(model(SOURCE, TARGET, *arrays))
    assert np.abs(expected - backend.to_numpy(model(SOURCE, TARGET))).max() > 1e-3  # the masks change the result
    for given in (masks, [backend.from_numpy(array) for array in arrays]):
        np.testing.assert_array_equal(backend.to_numpy(model(SOURCE, TARGET, *given)), expected)


def test_numpy_memory_is_decoded(backend, model):
    """One backend can decode the encoder memory that a different backend computed."""
    expected = backend.to_numpy(model.decode(TARGET, backend.from_numpy(MEMORY), SOURCE))
    np.testing.assert_array_equal(backend.to_numpy(model.decode(TARGET, MEMORY, SOURCE)), expected)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int32", "bool"])
def test_memory_with_wrong_dtype_raises_type_error(backend, model, nothing_runs, dtype):
    memory = MEMORY.astype(dtype)
    for given in (memory, backend.from_numpy(memory)):
        expected = (TypeError, f"memory must be float32: got {dtype}")
        assert refusal(model.decode, TARGET, given, SOURCE) == expected


def test_empty_attention_key_is_rejected(backend):
    empty = backend.from_numpy(np.ones((2, 3, 0, 5)))
    for length in (4, LONG):
        query = backend.from_numpy(np.ones((2, 3, length, 5)))
        for attend in attentions(backend):
            assert refusal(attend, query, empty, empty) == (ValueError, "key must not be empty: got (2, 3, 0, 5)")


def test_arguments_are_neither_changed_nor_kept(backend, model):
    source, target, memory = SOURCE.copy(), TARGET.copy(), backend.from_numpy(MEMORY)
    masks = SOURCE != 0, TARGET != 0
    expected = backend.to_numpy(model(SOURCE, TARGET, *masks))
    logits = model(source, target, *masks)
    decoded = model.decode(target, memory, source)
    for array, original in ((source, SOURCE), (target, TARGET), (masks[0], SOURCE != 0), (masks[1], TARGET != 0)):
        np.testing.assert_array_equal(array, original)
        array[...] = 1  # some frameworks compute asynchronously from the caller's memory
    np.testing.assert_array_equal(backend.to_numpy(logits), expected)
    np.testing.assert_array_equal(backend.to_numpy(memory), MEMORY)
    expected = backend.to_numpy(model.decode(TARGET, memory, SOURCE))
    np.testing.assert_array_equal(backend.to_numpy(decoded), expected)


# --- Queries that may attend to no key, and Marian's BOS token ---


@pytest.mark.parametrize("length", [5, LONG])
def test_fully_masked_query_has_zero_context(backend, length):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=shape) for shape in ((2, 3, length, 11), (2, 3, 7, 11), (2, 3, 7, 13)))
    mask = rng.random((2, 1, length, 7)) < 0.6
    mask[0, 0, :, 0] = True
    mask[0, 0, 2] = mask[1] = False
    fast, plain = attentions(backend)
    for dtype in backend.package.runtime.DTYPES:
        operands = [backend.from_numpy(array.astype(dtype)) for array in (query, key, value)]
        found = backend.to_numpy(fast(*operands, backend.from_numpy(mask)))
        expected = backend.to_numpy(plain(*operands, backend.from_numpy(mask)))
        for context in (found, expected):
            assert context.dtype.name == dtype
            assert not context[0, :, 2].any()
            assert not context[1].any()
            assert np.delete(context[0], 2, axis=1).any(axis=-1).all()
        if dtype == "float64":
            assert np.linalg.norm(found - expected) <= 1e-12 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "explicit", tiers.first_alone([False, True], "attentions", "jax", "tf"), ids=["fused", "explicit"]
)
def test_all_padding_sentence_leaves_all_values_finite(backend, explicit):
    config = tiny_config(attention_bias=True, num_encoder_layers=1, num_decoder_layers=1)
    weights = random_weights(config)
    model = backend.package.Transformer.from_weights(config, weights, dtype="float64")
    source, target_mask = np.array([[5, 6, 7], [0, 0, 0]]), np.array([[True, True], [False, False]])
    inputs, seen = (source, TARGET[:, :2], None, target_mask), Recorder("**.context", "**_attention.output")
    logits = backend.to_numpy(model(*inputs, tap=seen) if explicit else model(*inputs))
    assert np.isfinite(logits).all()
    for name, value in seen.items():
        value = backend.to_numpy(value)
        if name.endswith("context"):
            assert not value[1].any(), name
            assert value[0].any(), name
        else:  # only the projection's bias remains
            bias = weights[name.replace(".output", ".output_proj.bias")]
            np.testing.assert_array_equal(value[1], np.broadcast_to(bias, value[1].shape), err_msg=name)
    if backend.name != "numpy":
        for gradient in backend.gradients(model, *inputs, **({"tap": Recorder()} if explicit else {})):
            assert np.isfinite(gradient).all()


def test_padding_id_can_be_the_bos_token(backend):
    """Marian uses its padding ID as the BOS token: the first position is a token, and any later one is padding."""
    config = tiny_config("marian", num_encoder_layers=1, num_decoder_layers=1)
    assert config.bos_id == config.pad_id == 1
    model = backend.package.Transformer.from_weights(config, random_weights(config), dtype="float64")
    seen = Recorder("decoder.layers.0.self_attention.weights")
    model(TARGET[:1] + 5, np.array([[1, 7, 1, 8]]), tap=seen)
    (weights,) = (backend.to_numpy(value) for value in seen.values())
    np.testing.assert_array_equal(weights[..., 0, :] > 0, [[[True, False, False, False]] * 3])
    np.testing.assert_array_equal(weights[..., 3, :] > 0, [[[True, True, False, True]] * 3])
