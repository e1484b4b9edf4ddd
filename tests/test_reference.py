"""The reference matches closed forms, statements in the paper, and alternative formulations of itself.

Uses only NumPy in float64. Sections 3.2 to 3.5, Table 3, and Figure 1 refer to "Attention Is All You Need".
"""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import pytest
from conftest import random_weights, tiny_config

import reference_numpy as ref
from reference_numpy import fast, functional


def close(ours, expected):
    """Check agreement up to rounding for values of order one."""
    np.testing.assert_allclose(ours, expected, rtol=1e-13, atol=1e-13)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def model_and_ids(preset="paper_base", dtype="float64", **overrides):
    """Return a tiny model with random weights, and source and target IDs without padding."""
    config = tiny_config(preset, **overrides)
    rng = np.random.default_rng(1)
    source = rng.integers(3, config.source_vocab_size, (2, 7))
    target = rng.integers(3, config.target_vocab_size, (2, 6))
    return ref.Transformer.from_weights(config, random_weights(config), dtype=dtype), source, target


ATTENTIONS = pytest.mark.parametrize("attend", [ref.scaled_dot_product_attention, fast.attend])


@ATTENTIONS
def test_attention_of_two_keys_matches_the_closed_form(attend):
    query = np.array([0.0, math.sqrt(2.0)]).reshape(1, 1, 1, 2)
    identity = np.eye(2).reshape(1, 1, 2, 2)
    close(attend(query, identity, identity).ravel(), np.array([1.0, math.e]) / (1.0 + math.e))


@pytest.mark.parametrize("softmax", [functional.masked_softmax, fast.softmax])
def test_softmax_is_invariant_to_shifts_and_never_overflows(softmax):
    scores = np.arange(-12.0, 12.0).reshape(4, 6) / 8.0
    for shift in (1024.0, -1024.0):  # exactly representable, so results must be bitwise identical
        np.testing.assert_array_equal(softmax(scores + shift), softmax(scores.copy()))
    np.testing.assert_array_equal(softmax(np.array([[1e300, 0.0, -1e300]])), [[1.0, 0.0, 0.0]])


@ATTENTIONS
def test_mask_leaves_exactly_the_allowed_keys(attend):
    query, key, value = random(2, 3, 4, 5), random(2, 3, 6, 5, seed=1), random(2, 3, 6, 7, seed=2)
    allowed = [0, 2, 3]
    mask = np.isin(np.arange(6), allowed)[None, None, None, :]
    context = attend(query, key, value, mask)
    close(context, attend(query, key[:, :, allowed], value[:, :, allowed]))
    for array in (key, value):
        array[:, :, [1, 4, 5]] = 1e100
    np.testing.assert_array_equal(attend(query, key, value, mask), context)


def test_fully_masked_query_outputs_only_the_bias():
    model, _, _ = model_and_ids("torch")
    attention = model.encoder.layers[0].self_attention
    mask = np.ones((2, 1, 4, 6), dtype=bool)
    mask[1, :, 2] = False
    seen = ref.Recorder()
    output = attention(random(2, 4, 24), random(2, 6, 24, seed=1), mask, seen)
    assert not seen["weights"][1, :, 2].any()
    assert not seen["context"][1, :, 2].any()
    np.testing.assert_array_equal(output[1, 2], attention.output_proj.bias)
    assert seen["context"][1, :, 3].all()


def test_layer_norm_matches_a_hand_computation():
    scale, bias = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_array_equal(functional.layer_norm(np.full((1, 4), 7.0), scale, bias, 1e-6), bias[None])
    x = np.array([[1.0, 2.0, 3.0, 4.0]])  # mean 2.5, biased variance 1.25, and 1.25 + 0.19 = 1.2^2
    close(functional.layer_norm(x, scale, bias, 0.19), np.array([[-1.5, -0.5, 0.5, 1.5]]) / 1.2 * scale + bias)
    x = np.array([[1.0, 2.0, 3.0]])  # unbiased standard deviation 1, and 1 + 0.25 = 5/4
    scale, bias = scale[:3], bias[:3]
    close(functional.layer_norm(x, scale, bias, 0.25, "annotated"), np.array([[-0.8, 0.0, 0.8]]) * scale + bias)


def test_layer_norm_survives_a_large_mean_in_float32():
    x = np.array([[1000.0, 1000.25, 999.75, 1000.0]], np.float32)  # E[x^2] - E[x]^2 loses all digits
    y = functional.layer_norm(x, np.ones(4, np.float32), np.zeros(4, np.float32), 1e-6)
    one = 0.25 / math.sqrt(0.03125 + 1e-6)
    np.testing.assert_allclose(y, [[0.0, one, -one, 0.0]], rtol=1e-6)


def test_activations_match_their_definitions():
    x = np.linspace(-6.0, 6.0, 2401)
    np.testing.assert_array_equal(functional.relu(x), [max(0.0, value) for value in x])
    close(functional.gelu(x), [value * (1.0 + math.erf(value / math.sqrt(2.0))) / 2.0 for value in x])
    close(functional.swish(x), x / (1.0 + np.exp(-x)))
    np.testing.assert_array_equal(functional.swish(np.array([-1e4, 0.0, 1e4])), [0.0, 0.0, 1e4])
    distance = np.abs(functional.gelu_tanh(x) - functional.gelu(x))
    assert distance.max() == pytest.approx(4.73e-4, abs=1e-6)
    assert abs(x[distance.argmax()]) == pytest.approx(2.70, abs=0.01)


def test_dropout_rescales_kept_values():
    x = np.full((400, 500), 3.0)
    y = functional.dropout(x, functional.draw_keep(x.shape, 0.2, np.random.default_rng(0)), 0.2)
    np.testing.assert_array_equal(np.unique(y), [0.0, 3.0 / 0.8])
    assert (y == 0.0).mean() == pytest.approx(0.2, abs=0.004)  # four standard deviations
    assert y.mean() == pytest.approx(3.0, abs=0.015)
    assert ref.Dropout(0.2)(x) is x
    drop = partial(ref.Dropout(0.5), rng=np.random.default_rng(1))
    context = ref.scaled_dot_product_attention(x[None, None, :5], x[None, None, :7], x[None, None, :7], dropout=drop)
    assert context.any()
    close(np.ptp(context, axis=-1), 0.0)  # dropout applies to the weights, so all channels of a context are equal


def test_dropout_differs_per_sentence_and_head_and_is_reproducible():
    model, source, target = model_and_ids(dropout=ref.DropoutRates(attention=0.5, embedding=0.0, residual=0.0))
    attention = model.encoder.layers[0].self_attention
    for projection in (attention.query_proj, attention.key_proj, attention.value_proj):
        projection.kernel[...] = np.tile(projection.kernel[:, :8], 3)  # three identical heads
    x = np.tile(random(1, 5, 24), (2, 1, 1))  # two identical sentences
    seen = ref.Recorder()
    attention(x, x, tap=seen, rng=np.random.default_rng(0))
    close(seen["weights"], np.broadcast_to(seen["weights"][:1, :1], (2, 3, 5, 5)))  # the tap precedes the dropout
    assert len(np.unique(seen["context"].reshape(6, -1), axis=0)) == 6

    def train(seed):
        return model(source, target, rng=np.random.default_rng(seed))

    np.testing.assert_array_equal(train(3), train(3))
    assert not np.array_equal(train(3), train(4))
    assert not np.array_equal(train(3), model(source, target))


def only(site):
    """Return rates that drop almost everything at one site (99.999%) and nothing elsewhere."""
    return {"dropout": ref.DropoutRates(**{"embedding": 0.0, "residual": 0.0, site: 0.99999})}


@pytest.mark.parametrize("norm_order", ["post", "pre"])
def test_residual_dropout_removes_the_sublayers(norm_order):
    model, _, _ = model_and_ids(norm_order=norm_order, **only("residual"))
    x, memory, rng = random(2, 5, 24), random(2, 7, 24, seed=1), np.random.default_rng(0)
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    in_encoder = in_decoder = x
    if norm_order == "post":
        in_encoder = encoder.feed_forward_norm(encoder.self_attention_norm(x))
        in_decoder = decoder.feed_forward_norm(decoder.cross_attention_norm(decoder.self_attention_norm(x)))
    np.testing.assert_array_equal(encoder(x, rng=rng), in_encoder)
    np.testing.assert_array_equal(decoder(x, memory, rng=rng), in_decoder)


def test_each_kind_of_dropout_drops_only_its_own_values():
    def train(site):
        model, source, target = model_and_ids("torch", **only(site))
        seen = ref.Recorder()
        model(source, target, tap=seen, rng=np.random.default_rng(0))
        return model, seen

    _, seen = train("attention")
    contexts = [value for name, value in seen.items() if name.endswith(".context")]
    assert len(contexts) == 2 + 2 * 3
    assert not any(context.any() for context in contexts)

    model, seen = train("feed_forward")
    for stack, layers in (("encoder", model.encoder.layers), ("decoder", model.decoder.layers)):
        for i, layer in enumerate(layers):
            output = seen[f"{stack}.layers.{i}.feed_forward.output"]
            assert seen[f"{stack}.layers.{i}.feed_forward.inner"].any()
            np.testing.assert_array_equal(output, np.broadcast_to(layer.feed_forward.output_proj.bias, output.shape))

    model, seen = train("embedding")
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        assert seen[f"{side}_embedding.output"].all()
        bias = getattr(model, stack).layers[0].self_attention.query_proj.bias.reshape(3, 1, 8)
        query = seen[f"{stack}.layers.0.self_attention.query"]
        np.testing.assert_array_equal(query, np.broadcast_to(bias, query.shape))


def test_positional_encodings_match_known_entries():
    encoding = ref.sinusoidal_encoding(50, 512)
    np.testing.assert_array_equal(encoding[0], np.tile([0.0, 1.0], 256))
    close(encoding[1, :2], [math.sin(1.0), math.cos(1.0)])
    close(encoding[10, 256:258], [math.sin(0.1), math.cos(0.1)])  # 10000^(256/512) = 100
    close(encoding[49, 510:], [math.sin(49 / 10000 ** (510 / 512)), math.cos(49 / 10000 ** (510 / 512))])


def test_offset_position_is_a_rotation_of_the_position():
    """Section 3.5: "for any fixed offset k, PE(pos+k) can be represented as a linear function of PE(pos)"."""
    encoding = ref.sinusoidal_encoding(200, 24)
    for k in (1, 7, 60):
        rotation = np.zeros((24, 24))
        for i in range(0, 24, 2):
            sine, cosine = encoding[k, i : i + 2]
            rotation[i : i + 2, i : i + 2] = [[cosine, -sine], [sine, cosine]]
        close(encoding[:-k] @ rotation, encoding[k:])


@pytest.mark.parametrize("timescale", ["m", "m_minus_1"])
def test_wavelengths_are_geometric(timescale):
    first = ref.sinusoidal_encoding(1, 64, "split", timescale, offset=1)[0]
    wavelengths = 2.0 * math.pi / np.arctan2(first[:32], first[32:])
    steps = 32 if timescale == "m" else 31
    np.testing.assert_allclose(wavelengths, 2.0 * math.pi * 10000.0 ** (np.arange(32) / steps), rtol=1e-12)
    assert wavelengths[0] == pytest.approx(2.0 * math.pi)
    assert (wavelengths[-1] == pytest.approx(10000.0 * 2.0 * math.pi)) == (timescale == "m_minus_1")


def test_layouts_and_offsets_only_reorder_positional_encodings():
    interleaved, split = (ref.sinusoidal_encoding(9, 24, layout) for layout in ("interleaved", "split"))
    np.testing.assert_array_equal(np.concatenate([interleaved[:, 0::2], interleaved[:, 1::2]], axis=1), split)
    np.testing.assert_array_equal(ref.sinusoidal_encoding(5, 24, offset=4), interleaved[4:])


@pytest.mark.parametrize(("sizes", "length"), [({}, 5), ({"d_k": 5, "d_v": 7}, 7)], ids=["L = M", "d_k != d_v"])
def test_multi_head_attention_matches_heads_computed_separately(sizes, length):
    """Section 3.2.2: Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)."""
    model, _, _ = model_and_ids("torch", **sizes)
    attention, config = model.decoder.layers[1].cross_attention, model.config
    x, memory = random(2, 5, 24), random(2, length, 24, seed=1)
    mask = np.random.default_rng(2).random((2, 1, 5, length)) < 0.7
    mask[..., 3] = True

    def project(projection, inputs, i, width):
        part = slice(i * width, (i + 1) * width)
        return inputs @ projection.kernel[:, part] + projection.bias[part]

    heads = []
    for i in range(3):
        scores = project(attention.query_proj, x, i, config.d_k) @ project(attention.key_proj, memory, i, config.d_k).mT
        weights = np.where(mask[:, 0], np.exp(scores / math.sqrt(config.d_k)), 0.0)
        weights /= weights.sum(axis=-1, keepdims=True)
        heads.append(weights @ project(attention.value_proj, memory, i, config.d_v))
    expected = np.concatenate(heads, axis=-1) @ attention.output_proj.kernel + attention.output_proj.bias
    close(attention(x, memory, mask), expected)


@pytest.mark.parametrize("norm_order", ["post", "pre"])
def test_target_token_influences_only_itself_and_later_positions(norm_order):
    model, source, target = model_and_ids(norm_order=norm_order)
    logits = model(source, target)
    for j in range(6):
        changed = target.copy()
        changed[:, j] = 3 + (target[:, j] - 2) % 30
        moved = (model(source, changed) != logits).any(axis=(0, 2))
        np.testing.assert_array_equal(moved, np.arange(6) >= j)


def test_encoder_without_positions_is_permutation_equivariant():
    model, source, target = model_and_ids()
    order = np.array([3, 0, 6, 1, 5, 2, 4])
    x = random(2, 7, 24)
    close(model.encoder(x[:, order]), model.encoder(x)[:, order])
    assert np.abs(model.encode(source[:, order]) - model.encode(source)[:, order]).max() > 0.1
    assert np.abs(model(source[:, order], target) - model(source, target)).max() > 0.01


@pytest.mark.parametrize("preset", ["paper_base", "annotated", "fairseq"])
def test_padding_and_batching_change_no_logit(preset):
    model, source, target = model_and_ids(preset)
    logits = model(source, target)
    pads = np.full((2, 3), model.config.pad_id)
    close(model(np.concatenate([source, pads], axis=1), np.concatenate([target, pads], axis=1))[:, :6], logits)
    for i in range(2):
        close(model(source[i : i + 1], target[i : i + 1]), logits[i : i + 1])
    close(model.decode(target, model.encode(source), source), logits)
    source[1, 5:] = target[1, 4:] = model.config.pad_id
    close(model(source, target)[1:, :4], model(source[1:, :5], target[1:, :4]))


@pytest.mark.parametrize("preset", ref.PRESETS)
def test_taps_match_tap_shapes_and_do_not_change_the_logits(preset):
    for depths in ((2, 3), (1, 1)):
        depth = dict(zip(("num_encoder_layers", "num_decoder_layers"), depths, strict=True))
        model, source, target = model_and_ids(preset, dtype="float32", **depth)
        seen = ref.Recorder()
        logits = model(source, target, tap=seen)
        shapes = ref.tap_shapes(model.config, 2, source.shape[1], target.shape[1])
        assert [(name, value.shape) for name, value in seen.items()] == list(shapes.items())
        assert {value.dtype for value in seen.values()} == {np.dtype("float32")}
        np.testing.assert_array_equal(model(source, target), logits)
        trained = ref.Recorder()
        model(source, target, tap=trained, rng=np.random.default_rng(0))
        dtypes = {value.dtype.name for name, value in trained.items() if not name.endswith("_keep")}
        assert dtypes == {"float32"}


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swish"])
def test_activations_preserve_float32(activation):
    model, source, target = model_and_ids(dtype="float32", activation=activation)
    assert model(source, target).dtype == np.float32


def test_recorder_keeps_matching_taps_of_a_single_call():
    model, source, target = model_and_ids()
    seen = ref.Recorder("decoder.layers.*.output", "encoder.output")
    model(source, target, tap=seen)
    everything = ref.Recorder()
    model(source, target, tap=everything)
    kept = [name for name in everything if re.fullmatch(r"decoder\.layers\.\d\.output", name)]
    assert list(seen) == ["encoder.output", *kept]
    with pytest.raises(ValueError, match=r"tap encoder\.output was recorded twice"):
        model(source, target, tap=seen)


def test_replaced_tap_changes_everything_downstream():
    model, source, target = model_and_ids()
    other = source[:, ::-1].copy()
    memory = model.encode(other)
    seen = ref.Recorder("encoder.output", replace={"encoder.output": memory})
    np.testing.assert_array_equal(model(source, target, tap=seen), model(other, target))
    assert seen["encoder.output"] is memory
    seen = ref.Recorder(replace={"encoder.output": memory}, keep_computed=True)
    np.testing.assert_array_equal(model(source, target, tap=seen), model(other, target))
    np.testing.assert_array_equal(seen["encoder.output"], model.encode(source))
    path = "decoder.layers.0.cross_attention"
    uniform = ref.Recorder(f"{path}.weights", replace={f"{path}.scores": np.zeros((2, 3, 6, 7))})
    model(source, target, tap=uniform)
    close(uniform[f"{path}.weights"], 1.0 / 7.0)


def test_initial_weights_have_the_documented_distributions():
    config = tiny_config("keras_hub")
    weights = ref.init_weights(config, seed=1)
    assert list(weights) == list(ref.parameter_shapes(config))
    for name, array in weights.items():
        assert array.dtype == np.float32
        kind = name.rpartition(".")[2]
        if kind == "kernel":
            limit = math.sqrt(6.0 / (array.shape[0] + array.shape[1]))
            assert 0.98 * limit < np.abs(array).max() <= limit
            assert array.std() == pytest.approx(limit / math.sqrt(3.0), rel=0.1)
        elif kind == "table":
            assert array.std() == pytest.approx(config.d_model**-0.5, rel=0.1)
        else:
            assert (array == (1.0 if kind == "scale" else 0.0)).all()
    again, other = ref.init_weights(config, seed=1), ref.init_weights(config, seed=2)
    for name, array in weights.items():
        np.testing.assert_array_equal(again[name], array)
        assert name.endswith(("bias", "scale")) or not (other[name] == array).any()
