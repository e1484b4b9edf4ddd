"""The kind of a bug is recognized from arrays, without any knowledge of the model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from transformer_parity.pairs.diagnose.formulas import ACTIVATIONS
from transformer_parity.pairs.diagnose.recognize import KINDS, recognize

SEEDS = range(3)
FAR = {"float64": 1e-9, "float32": 1e-4}


def normal(rng, *shape):
    return rng.normal(size=shape)


def layer_norm(x, scale=1.0, shift=0.0, eps=1e-5, axis=-1, ddof=0, center=True, outside=False):
    centered = x - x.mean(axis, keepdims=True) if center else x
    count = np.prod([x.shape[a] for a in np.atleast_1d(axis)])
    variance = np.square(centered).sum(axis, keepdims=True) / (count - ddof)
    return centered / (np.sqrt(variance) + eps if outside else np.sqrt(variance + eps)) * scale + shift


def softmax(x, axis=-1):
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def rotate(x, half=True, base=10000.0, sign=1.0, start=0, axis=-2, scale=1.0):
    pairs = x.shape[-1] // 2
    theta = base ** (-np.arange(pairs) / pairs)
    position = np.arange(x.shape[axis]) * scale + start
    shape = [1] * x.ndim
    shape[axis], shape[-1] = len(position), pairs
    turn = np.exp(1j * sign * np.outer(position, theta)).reshape(shape)
    one, two = (np.s_[..., :pairs], np.s_[..., pairs:]) if half else (np.s_[..., ::2], np.s_[..., 1::2])
    turned, found = (x[one] + 1j * x[two]) * turn, np.empty_like(x)
    found[one], found[two] = turned.real, turned.imag
    return found


def batch_norm(x, scale, shift, mean, variance, eps=1e-5):
    each = (1, -1, *[1] * (x.ndim - 2))
    scale, shift, mean, variance = (np.reshape(array, each) for array in (scale, shift, mean, variance))
    return (x - mean) / np.sqrt(variance + eps) * scale + shift


# Each function returns the port's tensor, the correct tensor, the earlier tensors, and the weights.
CASES = {}


def case(kind, said):
    def register(function):
        CASES[function.__name__] = (function, kind, said)
        return function

    return register


SIMPLE = {  # kind, sentence, shape of x, and a function of x that returns the port's tensor and the correct tensor
    "root": ("factor", "0.353553 times the correct ones, which is 1 / sqrt(8)", (2, 5, 8), lambda x: (x / 8**0.5, x)),
    "doubled": ("factor", "all values are 2 times the correct ones", (4, 9), lambda x: (2.0 * x, x)),
    "constant": ("offset", "1 is added to every value", (4, 9), lambda x: (x + 1.0, x)),
    "negated": ("sign", "all values have the wrong sign", (4, 9), lambda x: (-x, x)),
    "odd": ("sign", "indices of axis 2: 1, 3, 5, 7", (2, 5, 8), lambda x: (x * np.tile([1.0, -1.0], 4), x)),
    "transposed": ("transposed", "in the order [0, 2, 1]", (2, 5, 5), lambda x: (x.swapaxes(1, 2), x)),
    "shape": ("transposed", "in the order [0, 2, 1]", (2, 5, 7), lambda x: (x.swapaxes(1, 2), x)),
    "flat": ("transposed", "the shape is [10, 7] instead of [2, 5, 7]", (2, 5, 7), lambda x: (x.reshape(10, 7), x)),
    "reshaped": ("transposed", "of axes 1 and 2", (2, 3, 5, 7), lambda x: (x.swapaxes(1, 2).reshape(x.shape), x)),
    "heads": (*("transposed", "in different places", (2, 5, 3, 4)), lambda x: _joined(x.swapaxes(1, 2), x)),
    "shifted": ("shifted", "t - 1 (the first index: zeros)", (2, 5, 9), lambda x: (np.pad(x, PAD)[:, :-1], x)),
    "rolled": ("shifted", "t + 1 (the last index: rolled)", (2, 5, 9), lambda x: (np.roll(x, -1, 2), x)),
    "gates": ("order", "4 parts are in the order [0, 2, 1, 3]", (5, 4, 6), lambda x: _joined(x[:, [0, 2, 1, 3]], x, 5)),
    "interleaved": ("order", "2 parts are interleaved", (9, 2, 6), lambda x: _joined(x.swapaxes(1, 2), x, 9)),
    "reversed": ("order", "along axis 1, the order is 4, 3, 2, 1, 0", (2, 5, 12), lambda x: (x[:, ::-1], x)),
    "angle": ("rotary angle", "have the wrong sign", (2, 3, 7, 8), lambda x: (rotate(x, sign=-1.0), rotate(x))),
    "position": ("rotary angle", "are shifted by 1", (2, 3, 7, 8), lambda x: (rotate(x, start=1), rotate(x))),
    "scale": ("rotary angle", "are 0.25 times the", (2, 3, 7, 8), lambda x: (rotate(x, scale=0.25), rotate(x))),
    "axis": ("rotary angle", "axis 1 instead of axis 2", (2, 3, 7, 8), lambda x: (rotate(x, axis=1), rotate(x))),
    "softmax": ("axis", "over axis 2 instead of axis 3", (2, 3, 5, 7), lambda x: (softmax(x, 2), softmax(x))),
}
PAD = ((0, 0), (1, 0), (0, 0))


def _joined(mine, right, *lead):
    return mine.reshape(*(lead or (2, 5)), -1), right.reshape(*(lead or (2, 5)), -1)


def simple(shape, function, kind):
    def build(rng):
        x = normal(rng, *shape)
        return *function(x), {"x": x if kind.startswith("rotary") else normal(rng, *shape)}, {}

    return build


CASES |= {name: (simple(shape, function, kind), kind, said) for name, (kind, said, shape, function) in SIMPLE.items()}


@case("factor", "times the correct ones, which is sqrt(8)")
def scale_inside_softmax(rng):
    scores = normal(rng, 2, 3, 5, 7)
    return softmax(scores * math.sqrt(8)), softmax(scores), {"q": normal(rng, 2, 3, 5, 8)}, {}


@case("factor", "after subtracting x, all values are 0.5 times")
def scaled_branch(rng):
    x, y = normal(rng, 2, 5, 9), normal(rng, 2, 5, 9)
    return x + 0.5 * y, x + y, {"x": x, "z": normal(rng, 2, 5, 9)}, {}


@case("factor", "aren't multiplied by scale")
def scale_is_missing(rng):
    x, scale = normal(rng, 2, 5, 9), rng.uniform(0.5, 1.5, 9)
    return x, x * scale, {}, {"scale": scale}


@case("offset", "bias is missing")
def bias_is_missing(rng):
    x, bias = normal(rng, 2, 5, 9), normal(rng, 9)
    return x, x + bias, {}, {"other": normal(rng, 9), "bias": bias}


@case("offset", "bias is added one time too many")
def bias_of_channels_first(rng):
    x, bias = normal(rng, 2, 9, 5), normal(rng, 9)
    return x + bias[:, None], x, {}, {"bias": bias}


@case("offset", "b.bias is added instead of a.bias")
def exchanged_bias(rng):
    x, one, two = normal(rng, 4, 5, 9), normal(rng, 9), normal(rng, 9)
    return x + two, x + one, {}, {"a.bias": one, "b.bias": two}


@case("offset", "x is missing")
def residual_is_missing(rng):
    x, y = normal(rng, 2, 5, 9), normal(rng, 2, 5, 9)
    return y, x + y, {"x": x}, {}


@case("shifted", "positions is read from row 2 instead of row 0")
def shifted_positions(rng):
    x, table = normal(rng, 3, 5, 9), normal(rng, 12, 9)
    return x + table[2:7], x + table[:5], {}, {"positions": table}


@case("order", "qkv: values [4:8, 16:20, 28:32] instead of [12:24]")
def thirds(rng):
    x = normal(rng, 2, 5, 36)
    return x.reshape(2, 5, 3, 12)[..., 4:8].reshape(2, 5, 12), x[..., 12:24], {"qkv": x}, {}


@case("rotary pairs", "pairs (2i, 2i + 1) of q are rotated instead of pairs (i, i + 4)")
def rotary_pairs(rng):
    x = normal(rng, 2, 3, 7, 8)
    return rotate(x, half=False), rotate(x), {"q": x, "k": normal(rng, 2, 3, 7, 8)}, {}


@case("rotary pairs", "pairs (i, i + 2) of q are rotated instead of pairs (2i, 2i + 1)")
def rotary_pairs_of_merged_heads(rng):
    x = normal(rng, 2, 7, 3, 4)
    one, two = (rotate(x, half, axis=1).reshape(2, 7, 12) for half in (True, False))
    return one, two, {"q": x.reshape(2, 7, 12)}, {}


@case("rotary angle", "the base is 10000 instead of 500000")
def rotary_base(rng):
    x = normal(rng, 2, 3, 7, 16)
    return rotate(x, half=False), rotate(x, half=False, base=500000.0), {"q": x.swapaxes(1, 2).reshape(2, 7, 48)}, {}


@case("rotary angle", "nothing is rotated")
def rotary_missing(rng):
    x = normal(rng, 2, 3, 7, 8)
    right = np.concatenate([rotate(x[..., :4]), x[..., 4:]], -1)
    return x, right, {"q": x}, {}


@case("mask", "15 values aren't masked, but must be")
def scores_not_masked(rng):
    x = normal(rng, 3, 5, 5)
    right, mine = np.where(np.tri(5, dtype=bool), x, -np.inf), np.where(np.tri(5, dtype=bool), x, -np.inf)
    mine = np.where(np.eye(5, k=1) + np.eye(5, k=4) > 0, x, mine)
    return mine, right, {}, {}


@case("mask", "12 keys that the mask forbids get nonzero weight")
def future_keys(rng):
    x = normal(rng, 3, 5, 5)
    right, mine = (softmax(np.where(np.tri(5, k=k, dtype=bool), x, -np.inf)) for k in (0, 1))
    return mine, right, {"scores": x}, {}


@case("mask", "each is 1 position before its query")
def hidden_keys(rng):
    x = normal(rng, 2, 3, 5, 5)
    right, mine = (softmax(np.where(np.tri(5, dtype=bool) & gap, x, -np.inf)) for gap in (True, np.eye(5, k=-1) == 0))
    return mine, right, {}, {}


@case("mask", "3 vectors along axis 2 are zero only in the original")
def padding_not_zero(rng):
    x = normal(rng, 2, 5, 9)
    right = x.copy()
    right[1, 2:] = 0.0
    return x, right, {"x": normal(rng, 2, 5, 9)}, {}


@case("training mode", "as after dropout")
def dropout(rng):
    x = normal(rng, 4, 5, 9)
    return np.where(rng.random(x.shape) < 0.1, 0.0, x / 0.9), x, {"x": normal(rng, 4, 5, 9)}, {}


@case("training mode", "each channel of x (axis 1) is normalized with the mean and variance of the batch")
def batch_statistics(rng):
    x, scale, shift = normal(rng, 5, 6, 4, 3) + 1.0, rng.uniform(0.5, 1.5, 6), normal(rng, 6)
    mean, variance = normal(rng, 6), rng.uniform(0.5, 1.5, 6)
    mine = layer_norm(x, scale[:, None, None], shift[:, None, None], axis=(0, 2, 3))
    weights = {"scale": scale, "shift": shift, "mean": mean, "variance": variance}
    return mine, batch_norm(x, scale, shift, mean, variance), {"x": x}, weights


@case("epsilon", "in the batch norm of x, epsilon is 0.001 instead of 1e-05")
def epsilon_of_batch_norm(rng):
    x, scale, shift = normal(rng, 5, 6, 4), rng.uniform(0.5, 1.5, 6), normal(rng, 6)
    mean, variance = normal(rng, 6), rng.uniform(0.5, 1.5, 6)
    one, two = (batch_norm(x, scale, shift, mean, variance, eps) for eps in (1e-3, 1e-5))
    return one, two, {"x": x}, {"scale": scale, "shift": shift, "mean": mean, "variance": variance}


@case("epsilon", "over axis 2, epsilon is 0.001 instead of 1e-05")
def epsilon(rng):
    x, scale, shift = normal(rng, 2, 7, 24), rng.uniform(0.5, 1.5, 24), normal(rng, 24)
    one, two = (layer_norm(x, scale, shift, eps) for eps in (1e-3, 1e-5))
    return one, two, {"x": x, "y": normal(rng, 2, 7, 24)}, {}


@case("epsilon", "epsilon is 1e-05 instead of 0.001")
def epsilon_of_rms_norm(rng):
    x, scale = normal(rng, 12, 24), rng.uniform(0.5, 1.5, 24)
    one, two = (layer_norm(x, scale, eps=eps, center=False) for eps in (1e-5, 1e-3))
    return one, two, {"x": x}, {"scale": scale}


@case("epsilon", "epsilon is added after the square root is computed")
def epsilon_outside(rng):
    x, scale, shift = normal(rng, 2, 7, 24), rng.uniform(0.5, 1.5, 24), normal(rng, 24)
    one, two = (layer_norm(x, scale, shift, 1e-2, outside=outside) for outside in (True, False))
    return one, two, {"x": x}, {}


@case("epsilon", "over each channel (axis 1), epsilon is 0.001 instead of 1e-05")
def epsilon_of_instance_norm(rng):
    x, scale, shift = normal(rng, 5, 6, 4, 3), rng.uniform(0.5, 1.5, (6, 1, 1)), normal(rng, 6, 1, 1)
    one, two = (layer_norm(x, scale, shift, eps, axis=(2, 3)) for eps in (1e-3, 1e-5))
    return one, two, {"x": x}, {}


@case("epsilon", "over 2 groups of channels (axis 1), epsilon is 0.001 instead of 1e-05")
def epsilon_of_group_norm(rng):
    x, scale, shift = normal(rng, 5, 6, 4, 3), rng.uniform(0.5, 1.5, (6, 1, 1)), normal(rng, 6, 1, 1)
    grouped = x.reshape(5, 2, 3, 4, 3)
    one, two = (layer_norm(grouped, eps=eps, axis=(2, 3, 4)).reshape(x.shape) for eps in (1e-3, 1e-5))
    return one * scale + shift, two * scale + shift, {"x": x}, {}


@case("norm", "the variance is divided by n - 1")
def unbiased(rng):
    x, scale, shift = normal(rng, 2, 9, 24), rng.uniform(0.5, 1.5, 24), normal(rng, 24)
    return layer_norm(x, scale, shift, ddof=1), layer_norm(x, scale, shift), {"x": x}, {}


@case("norm", "the mean is not subtracted")
def not_centered(rng):
    x, scale, shift = normal(rng, 2, 9, 24) + 0.5, rng.uniform(0.5, 1.5, 24), normal(rng, 24)
    return layer_norm(x, scale, shift, center=False), layer_norm(x, scale, shift), {"x": x}, {}


@case("norm", "the scale is weight instead of 1 + weight")
def one_is_not_added(rng):
    x, scale, shift = normal(rng, 2, 9, 24), 0.3 * normal(rng, 24), normal(rng, 24)
    return layer_norm(x, scale, shift), layer_norm(x, 1.0 + scale, shift), {"x": x}, {}


@case("norm", "the scale is scale instead of 1 + scale")
def one_is_not_added_to_rms(rng):
    x, scale = normal(rng, 2, 9, 24), 0.3 * normal(rng, 24)
    return layer_norm(x, scale, center=False), layer_norm(x, 1.0 + scale, center=False), {"x": x}, {"scale": scale}


@case("norm", "the norm of x is over axis 2 in 2 groups instead of axis 2")
def norm_of_groups(rng):
    x, scale, shift = normal(rng, 2, 9, 24), rng.uniform(0.5, 1.5, 24), normal(rng, 24)
    grouped = layer_norm(x.reshape(2, 9, 2, 12)).reshape(x.shape)
    return grouped * scale + shift, layer_norm(x, scale, shift), {"x": x}, {}


@case("activation", "the activation of x is GELU with tanh instead of exact GELU")
def gelu(rng):
    x = normal(rng, 2, 9, 24)
    return ACTIVATIONS["GELU with tanh"](x), ACTIVATIONS["exact GELU"](x), {"x": x}, {}


@case("activation", "the activation of gate is exact GELU instead of SiLU")
def gated(rng):
    gate, up = normal(rng, 2, 9, 24), normal(rng, 2, 9, 24)
    one, two = (ACTIVATIONS[name](gate) * up for name in ("exact GELU", "SiLU"))
    return one, two, {"gate": gate, "up": up}, {}


@case("activation", "the activation of the first half of x is ReLU instead of sigmoid")
def gated_halves(rng):
    x = 3.0 * normal(rng, 2, 9, 24)
    one, two = (ACTIVATIONS[name](x[..., :12]) * x[..., 12:] for name in ("ReLU", "sigmoid"))
    return one, two, {"x": x}, {}


@case("activation", "of x before the product with fc.weight is quick GELU instead of exact GELU")
def before_linear(rng):
    x, weight, bias = normal(rng, 2, 9, 24), normal(rng, 10, 24), normal(rng, 10)
    one, two = (ACTIVATIONS[name](x) @ weight.T + bias for name in ("quick GELU", "exact GELU"))
    return one, two, {"x": x}, {"a": normal(rng, 10, 24), "fc.weight": weight, "fc.bias": bias}


@case("activation", "of gate (times up) before the product with down is exact GELU instead of GELU with tanh")
def gated_before_linear(rng):
    gate, up, weight = normal(rng, 2, 9, 24), normal(rng, 2, 9, 24), normal(rng, 10, 24)
    one, two = ((ACTIVATIONS[name](gate) * up) @ weight.T for name in ("exact GELU", "GELU with tanh"))
    return one, two, {"gate": gate, "up": up}, {"a": normal(rng, 10, 24), "down": weight}


@case("activation", "of the product of x and fc.kernel is tanh instead of ReLU")
def after_linear(rng):
    x, kernel, bias = normal(rng, 2, 9, 24), 0.3 * normal(rng, 24, 10), normal(rng, 10)
    one, two = (ACTIVATIONS[name](x @ kernel + bias) for name in ("tanh", "ReLU"))
    return one, two, {"x": x}, {"a": normal(rng, 24, 10), "fc.kernel": kernel, "fc.bias": bias}


@case("shifted", "the port reads row")
def rows_of_a_table(rng):
    table = normal(rng, 20, 12)
    rows = rng.integers(0, 17, (2, 9))
    return table[rows + 2], table[rows], {}, {"positions.weight": table}


@case("factor", "the values along axis 2 don't sum to 1")
def without_normalization(rng):
    weights = rng.uniform(size=(2, 9, 6))
    return weights, weights / weights.sum(-1, keepdims=True), {}, {}


@case("swapped", "SiLU is applied to up instead of gate")
def swapped(rng):
    gate, up = normal(rng, 2, 9, 24), normal(rng, 2, 9, 24)
    return ACTIVATIONS["SiLU"](up) * gate, ACTIVATIONS["SiLU"](gate) * up, {"gate": gate, "up": up}, {}


def noisy(array, rng):
    """Return an array with errors that are typical of float32."""
    finite = np.where(np.isfinite(array), array, 0.0)
    return (array + 2e-7 * np.abs(finite).max() * (finite != 0.0) * rng.normal(size=array.shape)).astype(np.float32)


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("name", CASES)
def test_kind_is_recognized(name, dtype):
    function, kind, said = CASES[name]
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        actual, wanted, earlier, weights = function(rng)
        if dtype == "float32":
            actual = noisy(actual, rng)
        found = recognize(actual, wanted, earlier, weights, FAR[dtype])
        assert {each.kind for each in found} == {kind}, found
        assert said in " / ".join(each.sentence for each in found), found


def test_every_kind_has_a_case():
    assert {kind for _, kind, _ in CASES.values()} == set(KINDS) - {"narrower dtype"}


@pytest.mark.parametrize(("dtype", "far"), [("bfloat16", 1e-4), ("float16", 1e-4), ("float32", 1e-9)])
def test_narrower_dtype_is_recognized(dtype, far):
    for seed in SEEDS:
        x = np.random.default_rng(seed).normal(size=(2, 5, 9))
        actual = x.astype(dtype).astype(np.float32 if dtype != "float32" else np.float64)
        (found,) = recognize(actual, x, {"x": x}, {}, far)
        assert (found.kind, found.sentence.split(":")[0]) == (
            "narrower dtype",
            f"every value has only {dtype} precision",
        )


def test_other_bugs_are_recognized_in_spite_of_a_narrower_dtype():
    x = np.random.default_rng(0).normal(size=(2, 5, 9))
    found = recognize((0.3 * x).astype(np.float32).astype(np.float64), x, {}, {}, 1e-9)
    assert [each.kind for each in found] == ["factor", "narrower dtype"]


@pytest.mark.parametrize("fill", [-1e9, -1e4, -np.inf])
def test_masked_scores_with_other_values_are_recognized(fill):
    x, allowed = np.random.default_rng(0).normal(size=(3, 5, 5)), np.tri(5, dtype=bool)
    right = np.where(allowed, x, -np.inf)
    (found,) = recognize(np.where(allowed | (np.eye(5, k=1) > 0), x, fill), right, {}, {}, 1e-9)
    assert (found.kind, "12 values aren't masked" in found.sentence) == ("mask", True)
    found = recognize(np.where(allowed, 2.0 * x, fill), np.where(allowed, x, fill), {}, {}, 1e-9)
    assert [(each.kind, each.sentence[:18]) for each in found] == [("factor", "all values are 2 t")]


SHAPES = [(4, 9), (2, 5, 9), (2, 3, 5, 8), (5, 6, 4, 3), (3, 4, 4)]


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("shape", SHAPES)
def test_unrelated_tensors_are_not_recognized(shape, dtype):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        earlier = {f"x{i}": normal(rng, *shape) for i in range(5)}
        weights = {"a.weight": normal(rng, shape[-1], shape[-1]), "a.bias": normal(rng, shape[-1])}
        one, two = normal(rng, *shape), normal(rng, *shape)
        pairs = [(one, two), (two + 1e-3 * one, two), (one + earlier["x4"], two), (softmax(one), softmax(two))]
        pairs += [(np.abs(one), np.abs(two)), (np.round(one), np.round(two)), (np.maximum(one, 0), np.maximum(two, 0))]
        pairs += [(layer_norm(earlier["x4"]) + 0.01 * one, layer_norm(earlier["x4"])), (np.tanh(one), np.tanh(two))]
        pairs += [(rotate(one), rotate(two))] if shape[-1] % 2 == 0 else []
        part = two.copy()
        part[0] = one[0]  # only one row is wrong
        for actual, wanted in [*pairs, (part, two)]:
            assert recognize(actual.astype(dtype), wanted, earlier, weights, FAR[dtype]) == []


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("name", CASES)
def test_correct_tensors_are_not_recognized(name, dtype):
    rng = np.random.default_rng(0)
    _, wanted, earlier, weights = CASES[name][0](rng)
    mine = noisy(wanted, rng) if dtype == "float32" else wanted * (1.0 + 1e-15 * rng.normal(size=wanted.shape))
    assert recognize(mine, wanted, earlier, weights, FAR[dtype]) == []


@pytest.mark.parametrize("name", CASES)
def test_unexplained_errors_of_a_known_formula_are_not_recognized(name):
    """The correct tensor has a known formula, but the port's tensor doesn't, or only in a part of the tensor."""
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        actual, wanted, earlier, weights = CASES[name][0](rng)
        if np.isfinite(wanted).all() and actual.shape == wanted.shape and CASES[name][1] != "mask":
            other = actual + 0.1 * np.abs(actual).max() * rng.normal(size=actual.shape)
            assert recognize(other, wanted, earlier, weights, 1e-9) == []


@pytest.mark.parametrize("name", CASES)
def test_errors_on_top_of_unknown_formulas_are_not_recognized(name):
    """The port's tensor is explained by an earlier tensor, but the correct tensor isn't."""
    if CASES[name][1] in ("norm", "epsilon", "activation", "swapped", "rotary pairs", "rotary angle"):
        for seed in SEEDS:
            rng = np.random.default_rng(seed)
            actual, wanted, earlier, weights = CASES[name][0](rng)
            assert recognize(actual, wanted + normal(rng, *wanted.shape), earlier, weights, 1e-9) == []


def test_zeros_of_correct_tensor_are_not_dropped():
    x = np.maximum(np.random.default_rng(0).normal(size=(4, 5, 9)), 0.0)
    (found,) = recognize(2.0 * x, x, {}, {}, 1e-9)
    assert found.kind == "factor"


def test_partly_explained_errors_are_not_recognized():
    """Adding the mean error leaves errors that are small enough, but it explains only half of the error."""
    rng, x = np.random.default_rng(0), np.random.default_rng(1).normal(size=(4, 5, 9))
    mine = x + 1.5e-4 * np.abs(x).max() * rng.uniform(size=x.shape)
    assert recognize(mine.astype(np.float32), x, {}, {}, 1e-4) == []


def test_ambiguous_activations_are_all_listed():
    x = np.random.default_rng(0).uniform(-1.0, 1.0, (4, 9))
    (found,) = recognize(np.maximum(x, 0.0), np.tanh(x), {"x": x}, {}, 1e-9)
    assert found.sentence == "the activation of x is ReLU or ReLU6 instead of tanh"


def test_activation_of_a_sum_and_of_a_stacked_weight_are_recognized():
    rng = np.random.default_rng(0)
    x, y, stack = rng.normal(size=(3, 4, 5, 9))[0], rng.normal(size=(4, 5, 9)), 4.0 * rng.normal(size=(2, 9, 7))
    (found,) = recognize(np.tanh(9 * x + y), np.maximum(9 * x + y, 0.0), {"x": 9 * x, "y": y}, {}, 1e-9)
    assert found.sentence == "the activation of y plus x is tanh instead of ReLU"
    (found,) = recognize(np.tanh(x @ stack[1]), np.maximum(x @ stack[1], 0.0), {"x": x}, {"w": stack}, 1e-9)
    assert found.sentence == "the activation of the product of x and w[1] is tanh instead of ReLU"
