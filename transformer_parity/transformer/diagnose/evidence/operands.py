"""Find wrong operands of a block: the kernel or input of a projection, a term of a sum, or the scores of a softmax."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations

import numpy as np
from numpy import ndarray

from reference_numpy.functional import layer_norm, rms_norm
from reference_numpy.layers import ACTIVATIONS
from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.signatures import SAME, is_close, without_heads, written
from transformer_spec.config import TransformerConfig

SAME_SCORE = 1e-6  # absolute tolerance for scores that are computed as logarithms of attention weights
SUBLAYERS = ("self_attention", "cross_attention", "feed_forward")


def of_operands(
    name: str, isolated: Arrays, wanted: Arrays, weights: Mapping[str, ndarray], config: TransformerConfig
) -> str:
    """Describe the wrong kernel, input, term, axis, or mask that explains the error of a block.

    Return an empty string if none of them explains the error. The functions for individual operands do the same.

    Args:
        name: Name of the first wrong tap.
        isolated: The port's tensors, each computed from correct inputs.
        wanted: The correct tensors for the same inputs.
        weights: The parameters.
        config: Config of the model.
    """
    return (
        other_kernel(name, isolated, wanted, weights)
        or other_input(name, isolated, wanted, weights, config)
        or other_terms(name, isolated, wanted)
        or other_softmax(name, isolated, wanted)
        or other_normed(name, isolated, wanted, weights, config)
        or other_affine(name, isolated, wanted, weights)
    )


def other_kernel(name: str, isolated: Arrays, wanted: Arrays, weights: Mapping[str, ndarray]) -> str:
    """Describe the parameter that the port uses instead of the kernel of a projection."""
    own = f"{name}_proj"
    if f"{own}.kernel" not in weights or np.shape(isolated[name]) != wanted[name].shape:
        return ""
    kernel, bias = weights[f"{own}.kernel"], weights.get(f"{own}.bias", np.zeros(()))
    actual, right = without_heads(isolated[name]), without_heads(wanted[name])
    states = [state for state in map(without_heads, wanted.values()) if state.shape == (*right.shape[:2], len(kernel))]
    read = next((state for state in states if is_close(state @ kernel + bias, right)), None)
    wrong = (actual != right).any(-1)  # both tensors contain the reference's values at padding
    for other, value in weights.items() if read is not None and wrong.any() else ():
        turned = {other: value, f"the transpose of {other}": value.T}
        for words, matrix in turned.items():
            if (
                matrix.shape == kernel.shape
                and words != f"{own}.kernel"
                and is_close((read @ matrix + bias)[wrong], actual[wrong])
            ):
                return f"the kernel is {words}, with the correct bias" if bias.ndim else f"the kernel is {words}"
        other_bias = weights.get(f"{other.removesuffix('.kernel')}.bias", np.zeros(()))
        both = value.shape == kernel.shape and other_bias.shape == bias.shape == kernel.shape[1:]
        if both and other != f"{own}.kernel" and is_close((read @ value + other_bias)[wrong], actual[wrong]):
            return f"the projection uses the kernel and the bias of {other.removesuffix('.kernel')}"
    return ""


def other_input(
    name: str, isolated: Arrays, wanted: Arrays, weights: Mapping[str, ndarray], config: TransformerConfig
) -> str:
    """Describe the tensor that a projection reads instead of its correct input."""
    kernel, bias = (weights.get(f"{name}_proj.{kind}", np.zeros(())) for kind in ("kernel", "bias"))
    if not kernel.ndim or np.shape(isolated[name]) != wanted[name].shape:
        return ""
    is_gated = config.gated_feed_forward and name.endswith(".inner")
    is_activated = name.endswith(".gate") or (name.endswith(".inner") and not is_gated)
    activation = ACTIVATIONS[config.activation] if is_activated else lambda x: x
    factor = wanted.get(f"{name.removesuffix('inner')}gate", np.ones(())) if is_gated else np.ones(())
    actual, right = without_heads(isolated[name]), without_heads(wanted[name])
    wrong = (actual != right).any(-1)  # both tensors contain the reference's values at padding
    if wrong.sum() < 2:
        return ""
    layer = re.sub(r"(\w+\.layers\.\d+\.|).*", r"\1", name)
    norms = [norm.removesuffix(".scale") for norm in weights if norm.startswith(layer) and norm.endswith("norm.scale")]
    for other, state in _states(name, wanted):
        if state.shape != (*right.shape[:2], len(kernel)):
            continue
        normed = {f"{norm}({other})": _normed(norm, state, weights, config) for norm in norms if other in wanted}
        for words, read in {other: state, **normed}.items():
            if is_close((activation(read @ kernel + bias) * factor)[wrong], actual[wrong]):
                return f"the projection reads {words}"
    return ""


def other_terms(name: str, isolated: Arrays, wanted: Arrays) -> str:
    """Describe the terms that have a wrong factor, if the tensor is the output of a pre-norm layer.

    In a pre-norm layer, the output is a sum of multiple terms.
    """
    layer = name.removesuffix(".output")
    terms = {one: array for one, array in _terms(layer, wanted) if array.shape == wanted[name].shape}
    if isolated[name].shape != wanted[name].shape or not is_close(sum(terms.values(), np.zeros(())), wanted[name]):
        return ""
    wrong = (isolated[name] != wanted[name]).any(-1)  # both tensors contain the reference's values at padding
    rows = np.stack([array[wrong].ravel() for array in terms.values()], axis=-1)
    if len(rows) <= 2 * len(terms):
        return ""
    factors, _, rank, _ = np.linalg.lstsq(rows, isolated[name][wrong].ravel(), rcond=None)
    if rank < len(terms) or not is_close(rows @ factors, isolated[name][wrong].ravel()):
        return ""
    changed = [
        f"{one} {'is missing' if abs(factor) < SAME else f'is added {written(factor)} times'}"
        for one, factor in zip(terms, factors.tolist(), strict=True)
        if abs(factor - 1.0) > SAME
    ]
    return f"in the sum, {' and '.join(changed)}" if changed else ""


def other_softmax(name: str, isolated: Arrays, wanted: Arrays) -> str:
    """Describe the wrong axis of a softmax, or the scores that the port doesn't mask before the softmax."""
    scores = np.asarray(wanted.get(f"{name.removesuffix('.weights')}.scores", ()), np.float64)
    if not name.endswith(".weights") or not np.shape(isolated[name]) == wanted[name].shape == scores.shape:
        return ""
    actual, right = (np.asarray(array, np.float64) for array in (isolated[name], wanted[name]))
    whole = (actual != right).any(-1).all((1, 2))  # both tensors contain the reference's values at padding
    sums, of_keys = actual[whole].sum(-1), actual[whole].sum(-2)
    if whole.any() and not is_close(sums, np.ones_like(sums)) and is_close(of_keys, np.where(of_keys > 0.5, 1.0, 0.0)):
        return "the weights add up to 1 over the queries instead of the keys: the softmax uses the wrong axis"
    allowed = (right > 0.0) & (actual > 0.0)
    forbidden = (right == 0.0) & (actual > 0.0) & allowed.any(-1, keepdims=True)
    if forbidden.sum() < 2 or (right[actual == 0.0] > 0.0).any():
        return ""
    with np.errstate(divide="ignore", invalid="ignore"):  # weights may be zero, and a query may have no allowed keys
        logs = np.log(actual)
        shifts = logs - scores  # for each query, the same for all keys if the port's scores are correct
        shift = np.where(allowed, shifts, -np.inf).max(-1, keepdims=True)
        to_add, to_set = shifts - shift, logs - shift
    if np.abs(np.where(allowed, to_add, 0.0)).max() > SAME_SCORE:
        return ""
    for found, words in ((to_add[forbidden], "are shifted by {}"), (to_set[forbidden], "are set to {}")):
        if np.ptp(found) <= SAME_SCORE:
            value = round(float(np.median(found)), 9) + 0.0  # no -0
            return f"the scores of the {len(found)} keys that the mask forbids {words.format(f'{value:g}')}" + (
                ": they are not masked" if words.startswith("are shifted") and value == 0.0 else ""
            )
    return ""


def other_normed(
    name: str, isolated: Arrays, wanted: Arrays, weights: Mapping[str, ndarray], config: TransformerConfig
) -> str:
    """Describe the tensor, or the sum of two tensors, that a norm reads instead of its correct input."""
    norm, layer = name.removesuffix(".output"), name.rpartition(".")[0].rpartition(".")[0]
    if (
        not name.endswith("_norm.output")
        or f"{norm}.scale" not in weights
        or isolated[name].shape != wanted[name].shape
    ):
        return ""
    wrong = (isolated[name] != wanted[name]).any(-1)  # both tensors contain the reference's values at padding
    read = [
        one
        for one in list(wanted)[: list(wanted).index(name)]
        if wanted[one].shape == wanted[name].shape and (one.startswith(f"{layer}.") or one.endswith("output"))
    ]
    if wrong.sum() < 2:
        return ""
    for names in (*((one,) for one in read), *combinations(read, 2)):
        x = sum((np.asarray(wanted[one], np.float64)[wrong] for one in names), np.zeros(()))
        normed = _normed(norm, x, weights, config)
        words = names[0] if len(names) == 1 else f"the sum of {' and '.join(names)}"
        for value, statement in ((normed, f"the norm reads {words}"), (x, f"the output is {words}, without a norm")):
            if is_close(value, np.asarray(isolated[name], np.float64)[wrong]):
                return statement
    return ""


def other_affine(name: str, isolated: Arrays, wanted: Arrays, weights: Mapping[str, ndarray]) -> str:
    """Describe the parameters that a norm uses instead of the correct scale and bias."""
    norm = name.removesuffix(".output")
    norm = norm if f"{norm}.scale" in weights else f"{norm}.final_norm"
    if f"{norm}.scale" not in weights or isolated[name].shape != wanted[name].shape:
        return ""
    wrong = (isolated[name] != wanted[name]).any(-1)  # both tensors contain the reference's values at padding
    scale = weights[f"{norm}.scale"]
    bias = weights.get(f"{norm}.bias", np.zeros_like(scale))
    if wrong.sum() < 3 or not scale.all():
        return ""
    normed, actual = (wanted[name][wrong] - bias) / scale, isolated[name][wrong]
    means = normed.mean(0), actual.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):  # a channel may have zero variance
        factor = ((normed - means[0]) * (actual - means[1])).sum(0) / ((normed - means[0]) ** 2).sum(0)
    summand = means[1] - factor * means[0]
    if not is_close(normed * factor + summand, actual):
        return ""
    known = {"1": np.ones_like(scale), "0": np.zeros_like(scale), **weights}
    found = [
        next((words for words, value in known.items() if value.shape == scale.shape and is_close(one, value)), "")
        for one in (factor, summand)
    ]
    return f"the norm multiplies by {found[0]} and adds {found[1]}" if all(found) else ""


def _normed(norm: str, x: ndarray, weights: Mapping[str, ndarray], config: TransformerConfig) -> ndarray:
    """Return the output of the named norm for the input ``x``."""
    scale = weights[f"{norm}.scale"]
    if config.layer_norm_kind == "rms":
        return rms_norm(x, scale, config.layer_norm_epsilon)
    return layer_norm(x, scale, weights[f"{norm}.bias"], config.layer_norm_epsilon, config.layer_norm_kind)


def _terms(layer: str, tensors: Arrays) -> Iterator[tuple[str, ndarray]]:
    """Yield the input of a layer and the outputs of its sub-layers."""
    stack, _, number = layer.rpartition(".")
    side = "source" if layer.startswith("encoder.") else "target"
    before = f"{stack}.{int(number) - 1}.output" if number.isdigit() and int(number) else f"{side}_embedding.output"
    for name in (before, *(f"{layer}.{sublayer}.output" for sublayer in SUBLAYERS)):
        if name in tensors:
            yield name, np.asarray(tensors[name], np.float64)


def _rows(array: ndarray) -> ndarray:
    """Return an array [B, L, ...] reshaped to [B, L, N]."""
    return array.reshape(*array.shape[:2], -1)


def _states(name: str, tensors: Arrays) -> Iterator[tuple[str, ndarray]]:
    """Yield each tensor that is computed before a tap, and each residual sum in the tap's layer, with a description."""
    before = list(tensors)[: list(tensors).index(name)]
    for other in before:
        array = np.asarray(tensors[other], np.float64)
        yield other, without_heads(array)
        if array.ndim == 4 and name.startswith(other.rpartition(".")[0]):
            yield f"{other}, merged channel by channel instead of head by head", _rows(array.transpose(0, 2, 3, 1))
            yield f"{other}, reshaped without a transpose", _rows(array.reshape(array.shape[0], array.shape[2], -1))
    parts = name.split(".layers.")
    if len(parts) < 2:
        return
    total, terms = np.zeros(()), list[str]()
    for other, array in _terms(f"{parts[0]}.layers.{parts[1].split('.')[0]}", {one: tensors[one] for one in before}):
        total, terms = total + array, [*terms, other]
        if len(terms) > 1:
            yield f"the sum of {', '.join(terms)}", total
