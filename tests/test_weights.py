"""Setting and exporting weights is bit-exact and never aliases arrays. One invalid tensor rejects all weights."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import pytest
import tiers
from conftest import assert_same_bits, random_weights, tiny_config

import reference_numpy
from reference_numpy import load_weights, parameter_shapes, save_weights
from transformer_spec.names import find

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])
STORAGE = ("float64", "float32", "float16", "bfloat16")
CONVENTIONS = {
    "tied": {},
    "output tied": {"tie_embeddings": "target_output", "output_bias": True, "final_norm": True},
    "untied": {"tie_embeddings": "none", "attention_bias": True, "feed_forward_bias": False, "d_k": 5, "d_v": 7},
    "different decoder sizes": {"decoder_num_heads": 2, "decoder_d_v": 5, "decoder_d_ff": 11, "embedding_norm": True},
    "no first self-attention": {"skip_first_self_attention": True},
    "learned": {"position_encoding": "learned", "position_offset": 2, "norm_order": "pre"},
}


@pytest.mark.parametrize("convention", tiers.first_alone(CONVENTIONS, "weights", "jax", "tf"))
def test_weight_file_round_trip_is_bit_exact(backend, tmp_path, convention):
    config = tiny_config(**CONVENTIONS[convention])
    weights = random_weights(config, dtype="float64")
    save_weights(tmp_path / "model.safetensors", config, weights)
    for dtype in backend.package.runtime.DTYPES:
        model = backend.package.load_transformer(tmp_path / "model.safetensors", dtype=dtype)
        expected = {name: array.astype(dtype) for name, array in weights.items()}
        assert model.config == config
        assert_same_bits(model.export_weights(), expected)
        assert list(model.export_weights()) == list(parameter_shapes(config))


@pytest.mark.parametrize("storage", STORAGE)
def test_every_storage_dtype_loads(backend, tmp_path, storage):
    config = tiny_config()
    path = tmp_path / "model.safetensors"
    save_weights(path, config, random_weights(config, dtype="float64"), dtype=storage)
    _, stored = load_weights(path)
    model = backend.package.load_transformer(str(path), dtype="float64")
    expected = {name: array.astype("float64") for name, array in stored.items()}
    assert_same_bits(model.export_weights(), expected)


@pytest.mark.parametrize("form", ["transposed", "reversed", "big-endian", "read-only", "broadcast"])
def test_arrays_in_any_memory_layout_are_accepted(backend, tmp_path, form):
    config = tiny_config()
    plain = random_weights(config, dtype="float64")
    if form == "broadcast":
        plain = {name: np.full(array.shape, array.flat[0]) for name, array in plain.items()}
    given = {name: reform(array, form) for name, array in plain.items()}
    model = backend.package.Transformer.from_weights(config, given, dtype="float64")
    assert_same_bits(model.export_weights(), plain)
    save_weights(tmp_path / "model.safetensors", config, given)
    assert_same_bits(load_weights(tmp_path / "model.safetensors")[1], plain)


def reform(array, form):
    """Return an equal array with a different memory layout or byte order."""
    if form == "transposed":
        return np.ascontiguousarray(array.T).T
    if form == "reversed":
        return np.ascontiguousarray(array[::-1])[::-1]
    if form == "big-endian":
        return array.astype(">f8")
    if form == "broadcast":
        return np.broadcast_to(array.flat[0], array.shape)
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("dtype", tiers.first_alone(["float32", "float64"], "weights", "jax", "tf"))
def test_model_shares_no_arrays_with_the_caller(backend, dtype):
    config = tiny_config("annotated", num_encoder_layers=1, num_decoder_layers=1)
    given = random_weights(config, dtype=dtype)
    original = {name: array.copy() for name, array in given.items()}
    model = backend.package.Transformer.from_weights(config, given, dtype=dtype)
    logits = backend.to_numpy(model(SOURCE, TARGET))
    for array in given.values():  # changing the caller's arrays doesn't change the model
        array[...] = 7.0
    np.testing.assert_array_equal(backend.to_numpy(model(SOURCE, TARGET)), logits)
    exported = model.export_weights()
    for array in exported.values():  # changing the exported arrays doesn't change the model
        array[...] = 8.0
    np.testing.assert_array_equal(backend.to_numpy(model(SOURCE, TARGET)), logits)
    exported = model.export_weights()
    change_in_place(backend, model)  # changing the model changes neither of the caller's arrays
    for name in given:
        assert (given[name] == 7.0).all(), name
        np.testing.assert_array_equal(exported[name], original[name], err_msg=name)
    for name, array in model.export_weights().items():
        np.testing.assert_array_equal(array, original[name] + 1, err_msg=name)


def change_in_place(backend, model):
    """Add one to every parameter in place."""
    if backend.name == "numpy":
        for name in parameter_shapes(model.config):
            parameter = find(model, name)
            parameter += 1
    elif backend.name == "torch":
        for parameter in model.parameters():
            parameter.data.add_(1)
    elif backend.name == "jax":
        for name in parameter_shapes(model.config):
            parameter = backend.package.weights.parameter_of(model, name)
            parameter.set_value(parameter.get_value() + 1)
    else:
        for variable in model.trainable_variables:
            variable.assign_add(np.ones(variable.shape, variable.dtype))


REPEATED = pytest.mark.extended("training", "jax", "tf")


@pytest.mark.parametrize(
    "convention", ["tied", pytest.param("output tied", marks=REPEATED), pytest.param("untied", marks=REPEATED)]
)
@pytest.mark.extended("training", "jax", "tf")
def test_tied_embeddings_stay_tied_through_training(port, convention):
    """After a step of the framework's own optimizer, all uses of a tied embedding matrix have the same new value."""
    config = tiny_config(num_encoder_layers=1, num_decoder_layers=1, **CONVENTIONS[convention])
    weights = random_weights(config, dtype="float64")
    model = port.package.Transformer.from_weights(config, weights, dtype="float64")
    assert (model.source_embedding is model.target_embedding) == config.shares_embedding
    assert step(port, model) == len(parameter_shapes(config))
    trained = model.export_weights()
    for name, array in trained.items():
        if not name.endswith("key_proj.bias"):  # its gradient is mathematically zero
            assert not np.array_equal(array, weights[name]), name
    expected = reference_numpy.Transformer.from_weights(config, trained, dtype="float64")(SOURCE, TARGET)
    logits = port.to_numpy(model(SOURCE, TARGET))
    assert np.linalg.norm(logits - expected) <= 1e-12 * np.linalg.norm(expected)


def step(port, model):
    """Take one step of gradient descent with the framework's own optimizer, and return the number of parameters."""
    if port.name == "torch":
        import torch

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(SOURCE, TARGET).square().sum().backward()
        optimizer.step()
        return len(optimizer.param_groups[0]["params"])
    if port.name == "jax":
        import jax
        import optax
        from flax import nnx

        optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
        gradients = nnx.jit(nnx.grad(lambda model: (model(SOURCE, TARGET) ** 2).sum()))(model)
        optimizer.update(model, gradients)
        return len(jax.tree.leaves(gradients))
    import keras
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(SOURCE, TARGET) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    keras.optimizers.SGD(1e-3).apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return len(gradients)


NAME = "encoder.layers.1.feed_forward.inner_proj.kernel"


def broken_weights():
    """Yield the problem, the exception, the start of its message, and the weights."""
    weights = random_weights(tiny_config())
    fit, finite = "weights do not fit the config:", f"{NAME} must be finite: got"
    floats = f"dtype of {NAME} must be one of float64, float32, float16, bfloat16: got"
    nan, infinite = weights[NAME].copy(), weights[NAME].copy()
    nan[3, 5], infinite[:2, 7] = np.nan, -np.inf
    without = {name: array for name, array in weights.items() if name != NAME}
    yield "missing", ValueError, f"{fit} missing {NAME} [24, 40]", without
    named = {f"model.{name}": array for name, array in weights.items()}
    message = "weights must have canonical names: got model.source_embedding.table; model.encoder.layers.0"
    yield "other names", ValueError, message, named
    yield "extra", ValueError, f"{fit} unexpected extra.bias [3]", {**weights, "extra.bias": np.ones(3)}
    yield "renamed", ValueError, f"{fit} missing {NAME} [24, 40]; unexpected x [1]", {**without, "x": np.ones(1)}
    shape = f"{fit} {NAME} must have shape [24, 40]: got"
    yield "transposed", ValueError, f"{shape} [40, 24]", {**without, NAME: weights[NAME].T}
    yield "flat", ValueError, f"{shape} [960]", {**without, NAME: weights[NAME].ravel()}
    yield "integer", TypeError, f"{floats} int64", {**without, NAME: np.ones((24, 40), int)}
    yield "complex", TypeError, f"{floats} complex128", {**without, NAME: np.ones((24, 40), complex)}
    yield "object", TypeError, f"{floats} object", {**without, NAME: np.ones((24, 40), object)}
    yield "NaN", ValueError, f"{finite} 1 NaN or infinite values", {**without, NAME: nan}
    yield "infinite", ValueError, f"{finite} 2 NaN or infinite values", {**without, NAME: infinite}
    yield "none", ValueError, "weights contain 0 tensors, too few for the config's 5 layers", {}


ELSEWHERE = pytest.mark.extended("weights", "jax", "tf")  # the reference's checks apply to all packages
BROKEN = [pytest.param(*rest, id=case, marks=[ELSEWHERE] * bool(i)) for i, (case, *rest) in enumerate(broken_weights())]


@pytest.mark.parametrize(("kind", "message", "weights"), BROKEN)
def test_invalid_weights_are_rejected_completely(backend, tmp_path, kind, message, weights):
    config = tiny_config()
    good = random_weights(config)
    model = backend.package.Transformer.from_weights(config, good)
    for call in (
        lambda: backend.package.Transformer.from_weights(config, weights),
        lambda: backend.package.set_weights(model, weights),
        lambda: save_weights(tmp_path / "model.safetensors", config, weights),
    ):
        with pytest.raises(kind) as error:
            call()
        assert str(error.value).startswith(message)
    assert_same_bits(model.export_weights(), good)  # rejected completely, without loading any tensor
    assert not list(tmp_path.iterdir())


def test_overflow_in_the_dtype_is_rejected(backend):
    """A finite number may overflow in a smaller dtype."""
    config = tiny_config()
    weights = {**random_weights(config, dtype="float64"), NAME: np.full((24, 40), 1e300)}
    with pytest.raises(ValueError, match=f"^{NAME} overflows float32"):
        backend.package.Transformer.from_weights(config, weights)
