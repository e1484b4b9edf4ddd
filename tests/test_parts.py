"""Separate encoders and decoders: building, loading, and saving them, and comparing them with the full model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tiers
from conftest import assert_same_bits, random_weights, tiny_config

from reference_numpy import load_weights, parameter_shapes, save_weights

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])
MASK = SOURCE != 0
PARTS = ("encoder", "decoder")
SHALLOW = {"num_encoder_layers": 1, "num_decoder_layers": 1}
CONVENTIONS = {
    "tied": {**SHALLOW, "embedding_norm": True, "final_norm": True, "position_encoding": "learned"},
    "output tied": {"tie_embeddings": "target_output", "target_vocab_size": 41, "skip_first_self_attention": True},
    "untied": {**SHALLOW, "tie_embeddings": "none", "target_vocab_size": 41, "output_bias": True},
}


def alone(backend, part, config, weights, dtype="float64"):
    """Return an encoder or a decoder without the other part."""
    return getattr(backend.package, part.capitalize()).from_weights(config, weights, dtype)


@pytest.mark.parametrize("convention", tiers.first_alone(CONVENTIONS, "parts", "torch", "jax", "tf"))
def test_parts_match_the_whole_model(backend, convention):
    config = tiny_config(**CONVENTIONS[convention])
    weights = random_weights(config, dtype="float64")
    whole = backend.package.Transformer.from_weights(config, weights, "float64")
    encoder, decoder = (alone(backend, part, config, weights) for part in PARTS)
    memory, logits = encoder(backend.from_numpy(SOURCE)), backend.to_numpy(whole(SOURCE, TARGET))
    assert np.array_equal(backend.to_numpy(memory), backend.to_numpy(whole.encode(SOURCE)))
    lists = decoder(TARGET.tolist(), encoder(SOURCE.tolist()), SOURCE.tolist())
    np.testing.assert_allclose(backend.to_numpy(lists), logits, rtol=0, atol=1e-12)
    target, mask = backend.from_numpy(TARGET), backend.from_numpy(MASK)
    for options in ({"source_ids": backend.from_numpy(SOURCE)}, {"source_mask": mask}):
        np.testing.assert_allclose(backend.to_numpy(decoder(target, memory, **options)), logits, rtol=0, atol=1e-12)
    cache = decoder.init_cache(None, 3, source_mask=MASK, memory=memory)
    for position in range(3):
        step, cache = decoder.decode_step(TARGET[:, position], cache)
        np.testing.assert_allclose(backend.to_numpy(step), logits[:, position], rtol=0, atol=1e-12)


@pytest.mark.parametrize("convention", tiers.first_alone(CONVENTIONS, "parts", "torch", "jax", "tf"))
def test_part_loads_from_its_own_and_from_the_full_file(backend, tmp_path, convention):
    """A part uses the full model's tensor names, and loads from its own file or from the full model's file."""
    config = tiny_config(**CONVENTIONS[convention])
    weights = random_weights(config)
    names = [list(parameter_shapes(config, part)) for part in PARTS]
    assert {*names[0], *names[1]} == weights.keys()
    assert {*names[0]} & {*names[1]} == ({"source_embedding.table"} if convention == "tied" else set())
    for part, own in zip(PARTS, names, strict=True):
        expected = {name: weights[name] for name in own}
        model = alone(backend, part, config, weights, "float32")
        assert_same_bits(model.export_weights(), expected)
        path = tmp_path / f"{part}.safetensors"
        for given in (weights, model.export_weights()):
            save_weights(path, config, given, part=model.part)
            loaded = load_weights(path)
            assert loaded[0] == config
            assert_same_bits(loaded[1], expected)
        assert_same_bits(alone(backend, part, *loaded, "float32").export_weights(), expected)
        with pytest.raises(ValueError, match=r"^weights do not fit the config: missing "):
            backend.package.load_transformer(path)


@pytest.mark.extended("parts", "jax", "tf")
@pytest.mark.parametrize("part", PARTS)
def test_part_rejects_missing_and_unexpected_weights(backend, part):
    config = tiny_config(tie_embeddings="none")
    weights = random_weights(config)
    name, *others = parameter_shapes(config, part)
    for given, message in (
        ({other: weights[other] for other in others}, f"missing {name} "),
        ({**weights, name: weights[name][1:]}, f"{name} must have shape "),
        ({**weights, f"{part}.more": weights[name]}, f"unexpected {part}.more "),
        ({**weights, "more": weights[name]}, "unexpected more "),
    ):
        with pytest.raises(ValueError, match=f"^weights do not fit the config: {message}"):
            alone(backend, part, config, given)


def test_unknown_part_is_rejected(tmp_path):
    config = tiny_config()
    with pytest.raises(ValueError, match=r"^part must be one of encoder, decoder: got 'head'$"):
        save_weights(tmp_path / "x", config, random_weights(config), part="head")
    deep = config.replace(num_decoder_layers=10**9)  # must not matter for an encoder
    assert parameter_shapes(deep, "encoder") == parameter_shapes(config, "encoder")


MISSING = {
    "no memory": (
        {"memory": None, "source_mask": MASK},
        r"^a Decoder requires memory because it has no encoder: got None$",
    ),
    "no source": (
        {},
        r"^source_ids or source_mask must be given, because they specify the padding of the memory: got neither$",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_standalone_decoder_requires_memory_and_source_padding(backend, case):
    config = tiny_config()
    options, message = MISSING[case]
    decoder = alone(backend, "decoder", config, random_weights(config))
    memory = {"memory": backend.from_numpy(np.zeros((2, 4, 24)))}
    for call in (lambda **given: decoder.decode(TARGET, **given), lambda **given: decoder.init_cache(None, 3, **given)):
        with pytest.raises(ValueError, match=message):
            call(**{**memory, **options})


@pytest.mark.only("torch")
@pytest.mark.parametrize("part", PARTS)
def test_part_can_be_used_as_a_torch_module(port, part):
    """A part can be called with hooks, copied, saved, and trained like any other module."""
    import torch

    config = tiny_config(**SHALLOW)
    model = alone(port, part, config, random_weights(config), "float32")
    copied, called = copy.deepcopy(model), []
    copied.load_state_dict(model.state_dict())
    copied.register_forward_hook(lambda *_: called.append(True))
    optimizer = torch.optim.SGD(copied.train().parameters(), lr=0.1)
    inputs = [SOURCE] if part == "encoder" else [TARGET, torch.zeros(2, 4, 24), SOURCE]
    copied(*inputs).square().mean().backward()
    optimizer.step()
    before, after = model.export_weights(), copied.export_weights()
    assert called == [True]
    assert len([name for name in before if not np.array_equal(before[name], after[name])]) > len(before) // 2


@pytest.mark.only("jax")
@pytest.mark.parametrize("part", tiers.first_alone(PARTS, "parts"))
def test_part_can_be_used_as_an_nnx_module(port, part):
    import jax.numpy as jnp
    from flax import nnx

    config = tiny_config(**SHALLOW)
    model = alone(port, part, config, random_weights(config), "float32")
    inputs = [jnp.asarray(SOURCE)]
    if part == "decoder":
        inputs = [jnp.asarray(TARGET), jnp.zeros((2, 4, 24), "float32"), *inputs]
    merged = nnx.merge(*nnx.split(model))
    loss, gradients = nnx.jit(nnx.value_and_grad(lambda model: jnp.square(model(*inputs)).mean()))(merged)
    assert np.isfinite(loss)
    assert len(nnx.to_flat_state(gradients)) == len(parameter_shapes(config, part))
    assert copy.deepcopy(model).export_weights().keys() == model.export_weights().keys()


@pytest.mark.only("tf")
@pytest.mark.parametrize("part", tiers.first_alone(PARTS, "parts"))
def test_part_can_be_used_as_a_keras_model(port, part, tmp_path):
    """A part can be used in a functional model, saved, loaded, and trained with ``fit``."""
    import keras

    config = tiny_config(**SHALLOW)
    model = alone(port, part, config, random_weights(config), "float32")
    inputs, arrays = [keras.Input((None,), dtype="int32")], [SOURCE]
    if part == "decoder":
        inputs = [keras.Input((None,), dtype="int32"), keras.Input((None, 24)), *inputs]
        arrays = [TARGET, np.zeros((2, 4, 24), np.float32), SOURCE]
    functional = keras.Model(inputs, model(*inputs))
    expected = port.to_numpy(model(*map(port.from_numpy, arrays)))
    np.testing.assert_allclose(functional.predict(arrays, verbose=0), expected, atol=1e-5)
    functional.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    before = model.get_weights()
    for one, other in zip(before, loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    loaded.compile("sgd", "mse", jit_compile=False)
    loaded.fit(arrays, np.zeros_like(expected), verbose=0)
    assert sum(not np.array_equal(a, b) for a, b in zip(before, loaded.get_weights(), strict=True)) > len(before) // 2
