"""The reference's backward pass compared with finite differences, and the trainer that uses it.

These tests use NumPy in float64. Each parameter and tap is displaced in a random direction, and the change in the loss
must match the gradient. The four-point formula for ``f'`` has an error proportional to the fourth power of the step.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import tiers
from conftest import tiny_config
from finite_differences import DEPTH, RATES, everything, tiny_batch, tiny_model

import reference_numpy as ref
from reference_numpy import functional
from reference_numpy.attention import scaled_dot_product_attention_backward
from reference_numpy.training import cross_entropy_backward
from transformer_spec.names import find

CORNERS = {  # settings that no preset uses
    "gelu": ("paper_base", {"activation": "gelu"}),
    "gelu_tanh": ("torch", {"activation": "gelu_tanh", "output_bias": False}),
    "annotated post-norm": (
        "annotated",
        {"norm_order": "post", "tie_embeddings": "target_output", "activation": "swish"},
    ),
    "pre-norm without final norm": ("keras_hub", {"norm_order": "pre", "tie_embeddings": "all", "activation": "swish"}),
    "a narrower decoder": (
        "torch",
        {"decoder_num_heads": 2, "decoder_d_v": 5, "decoder_d_ff": 11, "activation": "gelu"},
    ),
    "no first self-attention": ("marian", {"skip_first_self_attention": True}),
    "no first self-attention, pre-norm": ("annotated", {"skip_first_self_attention": True, "activation": "gelu"}),
    "two head sizes": ("paper_base", {"d_k": 5, "d_v": 7, "feed_forward_bias": False, "activation": "gelu_tanh"}),
}


def distinct_presets():
    """Return one preset per group of presets that differ only in sizes, dropout, and the amount of label smoothing."""
    configs = {}
    for preset in ref.PRESETS:
        same = {"dropout": ref.DropoutRates(), "label_smoothing": 0.1, "d_k": 8, "d_v": 8}
        configs.setdefault(str(tiny_config(preset, **same, **DEPTH)), preset)
    return {preset: (preset, {}) for preset in configs.values()}


CASES = {**distinct_presets(), **CORNERS}


def assert_gradient(f, gradient, step=1e-4, what=""):
    """Check the directional derivative of a function in a random direction against its gradient.

    The error is relative to the norm of the gradient, because the slope in one direction may be nearly zero. The bound
    also allows for the rounding error of a difference over such a short step.
    """
    direction = np.random.default_rng(0).normal(size=gradient.shape)
    direction /= np.linalg.norm(direction)
    values = [f(distance * step * direction) for distance in (-2, -1, 1, 2)]
    found, expected = np.dot((1, -8, 8, -1), values) / (12.0 * step), np.vdot(gradient, direction)
    error, rounding = abs(found - expected), 4.0 * np.finfo(float).eps * np.max(np.abs(values)) / step
    assert error <= 1e-9 * np.linalg.norm(gradient) + rounding, (what, found, expected)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# Tests of the individual functions.
def check_arguments(function, arguments, dresult, gradients):
    """Check the gradient of each argument against finite differences of ``sum(dresult * function(*arguments))``."""
    for i, gradient in enumerate(gradients):
        assert gradient.shape == arguments[i].shape

        def moved(displacement, i=i):
            at = [argument + displacement if i == j else argument for j, argument in enumerate(arguments)]
            return np.vdot(dresult, function(*at))

        assert_gradient(moved, gradient, what=f"argument {i}")


def test_linear_gradients_match_finite_differences():
    x, kernel, bias, dy = random(2, 3, 5), random(5, 7), random(7), random(2, 3, 7, seed=1)
    gradients = functional.linear_backward(x, kernel, dy)
    check_arguments(functional.linear, (x, kernel, bias), dy, gradients)


def test_masked_softmax_gradient_matches_finite_differences():
    scores, dweights = random(3, 5, 7), random(3, 5, 7, seed=1)
    mask = random(3, 5, 7, seed=2) < 0.3
    mask[1, 2] = False
    for allowed in (mask, None):
        weights = functional.masked_softmax(scores, allowed)
        gradient = functional.masked_softmax_backward(weights, dweights)
        check_arguments(partial(functional.masked_softmax, mask=allowed), (scores,), dweights, (gradient,))
        np.testing.assert_allclose(gradient.sum(-1), 0.0, atol=1e-14)
        assert allowed is None or not gradient[~mask].any()


@pytest.mark.parametrize("epsilon", [1e-6, 0.3])
def test_rms_norm_gradients_match_finite_differences(epsilon):
    x, scale, dy = random(2, 3, 6), random(6, seed=1), random(2, 3, 6, seed=3)
    gradients = functional.rms_norm_backward(x, scale, epsilon, dy)
    check_arguments(lambda *at: functional.rms_norm(*at, epsilon), (x, scale), dy, gradients)


@pytest.mark.parametrize("kind", ["standard", "annotated"])
@pytest.mark.parametrize("epsilon", [1e-6, 0.3])
def test_layer_norm_gradients_match_finite_differences(kind, epsilon):
    x, scale, bias, dy = random(2, 3, 6), random(6, seed=1), random(6, seed=2), random(2, 3, 6, seed=3)
    gradients = functional.layer_norm_backward(x, scale, epsilon, dy, kind)
    check_arguments(lambda *at: functional.layer_norm(*at, epsilon, kind), (x, scale, bias), dy, gradients)


@pytest.mark.parametrize("kind", ["standard", "annotated"])
def test_layer_norm_gradient_of_a_constant_row_is_exact(kind):
    x, scale, dy = np.full((1, 6), 7.0), random(6), random(1, 6, seed=1)
    dx, dscale, dbias = functional.layer_norm_backward(x, scale, 0.25, dy, kind)
    dcentred = dy * scale - (dy * scale).mean()
    np.testing.assert_allclose(dx, dcentred / (0.5 if kind == "standard" else 0.25), rtol=1e-13)
    assert not dscale.any()
    np.testing.assert_array_equal(dbias, dy[0])


@pytest.mark.parametrize("name", functional.ACTIVATIONS)
def test_activation_gradient_matches_finite_differences(name):
    activation = functional.ACTIVATIONS[name]
    x, dy = np.linspace(-5.05, 5.0, 67), random(67)  # at least 0.02 away from zero
    gradient = functional.ACTIVATIONS_BACKWARD[activation](x, dy)
    check_arguments(activation, (x,), dy, (gradient,))
    narrow = functional.ACTIVATIONS_BACKWARD[activation](x.astype(np.float32), dy.astype(np.float32))
    assert narrow.dtype == np.float32


def test_dropout_gradient_matches_finite_differences():
    x, dy = random(4, 5), random(4, 5, seed=1)
    keep = functional.draw_keep(x.shape, 0.4, np.random.default_rng(0))
    check_arguments(lambda x: functional.dropout(x, keep, 0.4), (x,), dy, (functional.dropout(dy, keep, 0.4),))


def test_embedding_gradient_sums_over_repeated_ids():
    embedding = ref.TokenEmbedding(9, tiny_config(d_model=4, num_heads=2, scale_embedding=True), "float64")
    ids, dvectors, dtable = np.random.default_rng(0).integers(0, 6, (5, 7)), random(5, 7, 4), random(9, 4, seed=1)
    expected = dtable.copy()
    for place in np.ndindex(5, 7):
        expected[ids[place]] += 2.0 * dvectors[place]
    embedding.backward(ids, dvectors, dtable)
    np.testing.assert_allclose(dtable, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["uniform", "off_target", "off_target_and_pad"])
def test_cross_entropy_gradient_matches_finite_differences(kind, smoothing):
    config = tiny_config(label_smoothing=smoothing, label_smoothing_kind=kind, pad_id=4, target_vocab_size=37)
    logits, labels = 3.0 * random(4, 5, 37), tiny_batch(config)[2]
    gradient = cross_entropy_backward(logits, labels, config)
    check_arguments(lambda x: ref.cross_entropy(x, labels, config)[0], (logits,), 1.0, (gradient,))
    np.testing.assert_allclose(gradient.sum(-1), 0.0, atol=1e-14)
    assert not gradient[labels == 4].any()


def test_cross_entropy_gradient_of_extreme_logits_is_exact():
    config = tiny_config(label_smoothing=0.0)
    logits = np.zeros((1, 2, 37))
    logits[0, :, 5] = 1e4
    gradient = cross_entropy_backward(logits, np.array([[5, 6]]), config)
    np.testing.assert_array_equal(gradient[0, 0], 0.0)
    np.testing.assert_array_equal(gradient[0, 1, [5, 6]], [1.0, -1.0])


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_attention_gradients_match_finite_differences(rate):
    query, key, value = random(2, 3, 5, 11), random(2, 3, 7, 11, seed=1), random(2, 3, 7, 13, seed=2)
    mask = random(2, 1, 5, 7, seed=3) < 0.3
    mask[1, 0, 2] = False
    keep = functional.draw_keep((2, 3, 5, 7), rate, np.random.default_rng(4))

    def thin_out(x):
        return functional.dropout(x, keep, rate)

    def attend(query, key, value, bias, tap=ref.no_tap):
        return ref.scaled_dot_product_attention(query, key, value, mask, thin_out, tap, bias)

    seen, dcontext = ref.Recorder(), random(2, 3, 5, 13, seed=5)
    bias = random(2, 3, 5, 7, seed=6)  # its gradient is the gradient of the scores
    attend(query, key, value, bias, seen)
    gradients = scaled_dot_product_attention_backward(query, key, value, seen["weights"], dcontext, thin_out)
    check_arguments(attend, (query, key, value, bias), dcontext, gradients)
    assert not gradients[0][1, :, 2].any()  # this query may attend to no key


# Tests of the whole model, including every parameter and every tap.
def check_model(model, seed=None, *, smooth):
    """Check every gradient of the model against finite differences of its loss, with dropout if a seed is given."""
    config, step = model.config, 1e-4 if smooth else 1e-6  # a larger step could cross the kink of a ReLU
    source, target, labels = tiny_batch(config)

    def loss(tap=ref.no_tap):
        rng = None if seed is None else np.random.default_rng(seed)
        return ref.cross_entropy(model(source, target, tap=tap, rng=rng), labels, config)[0]

    seen = ref.Recorder()
    logits = model(source, target, tap=seen, rng=None if seed is None else np.random.default_rng(seed))
    dlogits = cross_entropy_backward(logits, labels, config)
    dparameters, dtaps = ref.transformer_backward(model, source, target, dlogits, seen)
    assert {name: array.shape for name, array in dparameters.items()} == ref.parameter_shapes(config)
    assert list(dparameters) == list(ref.parameter_shapes(config))
    shapes = ref.tap_shapes(config, *source.shape, target.shape[1])
    assert [(name, array.shape) for name, array in dtaps.items()] == [*shapes.items()]
    for name, gradient in dparameters.items():
        parameter = find(model, name)
        original = parameter.copy()

        def moved(displacement, parameter=parameter, original=original):
            parameter[...] = original + displacement
            return loss()

        assert_gradient(moved, gradient, step, name)
        parameter[...] = original
    for name, gradient in dtaps.items():

        def moved(displacement, name=name):
            return loss(lambda at, value: value + displacement if at == name else value)

        assert_gradient(moved, gradient, step, name)


# Presets that introduce no new convention.
REPEATED = {parameter.values[0] for parameter in tiers.presets() if parameter.marks}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.extended("presets")] * (case in REPEATED)) for case in CASES]
)
def test_all_gradients_match_finite_differences(case):
    preset, overrides = CASES[case]
    model = tiny_model(preset, **overrides)
    check_model(model, smooth=model.config.activation != "relu")


@pytest.mark.parametrize("norm_order", ["post", "pre"])
def test_all_gradients_with_dropout_match_finite_differences(norm_order):
    check_model(tiny_model(norm_order=norm_order, dropout=RATES, activation="swish"), seed=5, smooth=True)


@pytest.mark.parametrize("site", [field.name for field in dataclasses.fields(ref.DropoutRates)])
def test_taps_record_the_dropout_keep_masks(site):
    rates = ref.DropoutRates(**{**dict.fromkeys(dataclasses.asdict(RATES), 0.0), site: 0.4})
    model = tiny_model(dropout=rates)
    source, target, _ = tiny_batch(model.config)
    plain, seen = ref.Recorder(), ref.Recorder()
    model(source, target, tap=plain)
    model(source, target, tap=seen, rng=np.random.default_rng(0))
    endings = {
        "embedding": ("_embedding.output",),
        "attention": (".weights",),
        "residual": ("_attention.output", ".feed_forward.output"),
        "feed_forward": (".inner",),
        "final": ("coder.output",),
    }
    shapes = ref.tap_shapes(model.config, *source.shape, target.shape[1])
    assert list(plain) == list(shapes)
    expected = {f"{name}_keep": shape for name, shape in shapes.items() if name.endswith(endings[site])}
    assert {name: array.shape for name, array in seen.items() if name not in shapes} == expected
    kept = np.concatenate([seen[name].ravel() for name in expected])
    assert kept.dtype == bool
    assert kept.mean() == pytest.approx(0.6, abs=4 * (0.24 / kept.size) ** 0.5)  # within four standard deviations


@pytest.mark.parametrize("case", ["paper_base", "annotated"])
def test_loss_and_gradients_are_zero_without_labels(case):
    model = tiny_model(case)
    result = ref.gradients(model, *tiny_batch(model.config, labeled=False))
    assert result.loss == 0.0
    assert not any(gradient.any() for gradient in everything(result).values())


@pytest.mark.parametrize("case", ["paper_base", "annotated"])
def test_all_padding_source_has_finite_gradients(case):
    model = tiny_model(case)
    source, target, labels = tiny_batch(model.config)
    result = ref.gradients(model, np.full_like(source, model.config.pad_id), target, labels)
    assert all(np.isfinite(gradient).all() for gradient in everything(result).values())
    for name in ("scores", "query", "key", "value"):
        assert not result.taps[f"decoder.layers.0.cross_attention.{name}"].any()
    assert not result.parameters["encoder.layers.0.feed_forward.inner_proj.kernel"].any()
    assert result.taps["decoder.layers.0.cross_attention.output"].any()


def test_padding_positions_receive_no_gradient():
    model = tiny_model("marian")
    source, target, labels = tiny_batch(model.config)
    result = ref.gradients(model, source, target, labels)
    for name, gradient in result.taps.items():
        if name.endswith("scores"):  # adding the same value to all scores of a query doesn't change its weights
            np.testing.assert_allclose(gradient.sum(-1), 0.0, atol=1e-14)
    padding = source == model.config.pad_id
    assert not result.taps["encoder.output"][padding].any()
    assert not result.taps["decoder.layers.1.output"][labels == model.config.pad_id].any()
    for name, gradient in result.parameters.items():
        if name.endswith("key_proj.bias"):  # the bias adds the same value to all scores of a query
            assert np.abs(gradient).max() < 1e-14 * np.abs(result.parameters[name.replace("key", "query")]).max()


@pytest.mark.parametrize("tied", ["target_output", "all"])
def test_gradient_of_a_tied_embedding_is_the_sum_over_its_uses(tied):
    model = tiny_model(tie_embeddings=tied, target_vocab_size=37)
    batch, weights = tiny_batch(model.config), model.export_weights()
    of_tied = ref.gradients(model, *batch).parameters
    table = weights["source_embedding.table" if tied == "all" else "target_embedding.table"]
    apart = {**weights, "output_proj.kernel": table.T, "target_embedding.table": table}
    free = ref.Transformer.from_weights(model.config.replace(tie_embeddings="none"), apart, "float64")
    of_free = ref.gradients(free, *batch).parameters
    expected = of_free.pop("target_embedding.table") + of_free.pop("output_proj.kernel").T
    if tied == "all":
        of_free["source_embedding.table"] = of_free["source_embedding.table"] + expected
    else:
        of_free["target_embedding.table"] = expected
    assert of_tied.keys() == of_free.keys()
    for name, gradient in of_tied.items():
        np.testing.assert_allclose(gradient, of_free[name], rtol=1e-12, atol=1e-14)


def test_float32_model_has_float32_gradients():
    for preset in ("paper_learned", "annotated", "marian"):
        model = tiny_model(preset, dtype="float32")
        batch = tiny_batch(model.config)
        found = everything(ref.gradients(model, *batch))
        exact = everything(ref.gradients(tiny_model(preset), *batch))
        for name, gradient in found.items():
            assert gradient.dtype == np.float32, name
            if not name.endswith("key_proj.bias"):
                assert np.linalg.norm(gradient - exact[name]) <= 1e-4 * np.linalg.norm(exact[name]), name


def test_missing_tap_is_named_in_the_error():
    model = tiny_model()
    source, target, labels = tiny_batch(model.config)
    seen = ref.Recorder("decoder.**")
    dlogits = cross_entropy_backward(model(source, target, tap=seen), labels, model.config)
    with pytest.raises(
        ValueError, match=r"^seen must contain every tap: \d+ are missing, including source_embedding\."
    ):
        ref.transformer_backward(model, source, target, dlogits, seen)
