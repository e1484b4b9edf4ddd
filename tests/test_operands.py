"""Recognizing projections with a wrong kernel or input, residual sums of wrong terms, and softmaxes of wrong inputs."""

from __future__ import annotations

import numpy as np
import pytest

from reference_numpy.attention import split_heads
from reference_numpy.functional import layer_norm
from reference_numpy.layers import ACTIVATIONS
from transformer_parity.transformer.cases.case import Case, tiny
from transformer_parity.transformer.cases.inputs import token_ids
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, observed
from transformer_parity.transformer.diagnose.evidence.operands import of_operands, other_kernel
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION

BLOCK = "encoder.layers.0.self_attention"


def said(attention_bias, change):
    """Return the statement about the query of a model with modified weights."""
    config = tiny(d_k=None, d_v=None, attention_bias=attention_bias)
    case = Case("full/padded", "full model", config, "", token_ids(config))
    weights, wanted = dict(case.load_weights()), observed(TRUTH, case)
    changed = DEFINITION.load(config, {**weights, **change(weights)}, Placement("float64"))
    alone = dict(changed.run("", case.inputs, taps=True).taps)
    padding = (case.inputs["source_ids"] == config.pad_id)[:, None, :, None]
    alone[f"{BLOCK}.query"] = np.where(padding, wanted[f"{BLOCK}.query"], alone[f"{BLOCK}.query"])
    return other_kernel(f"{BLOCK}.query", alone, wanted, weights)


@pytest.mark.parametrize(("bias", "words"), [(True, ", with the correct bias"), (False, "")])
def test_kernel_of_another_projection_is_recognized(bias, words):
    """The query projection uses the key's kernel with its own bias."""
    exchanged = {f"{BLOCK}.query_proj.kernel": f"{BLOCK}.key_proj.kernel"}
    found = said(bias, lambda weights: {name: weights[other] for name, other in exchanged.items()})
    assert found == f"the kernel is {BLOCK}.key_proj.kernel{words}"


def test_transposed_kernel_is_recognized():
    """A kernel is [in, out] here, and [out, in] in PyTorch."""
    name = f"{BLOCK}.query_proj.kernel"
    assert said(False, lambda weights: {name: weights[name].T}) == f"the kernel is the transpose of {name}"


def test_unknown_kernel_is_not_reported():
    """Neither a scaled kernel nor the right kernel is reported."""
    name = f"{BLOCK}.query_proj.kernel"
    assert said(False, lambda weights: {name: 2.0 * weights[name]}) == ""
    assert said(False, lambda weights: {}) == ""


PRE = tiny(norm_order="pre", final_norm=True, d_k=None, d_v=None)
LAYER = "decoder.layers.1"
BEFORE = "decoder.layers.0.output"


def of_block(name, change):
    """Return the statement about a tap of a pre-norm model after ``change`` computes its value."""
    case = Case("full/padded", "full model", PRE, "", token_ids(PRE))
    weights, wanted = case.load_weights(), observed(TRUTH, case)
    return of_operands(name, {**wanted, name: change(wanted, weights)}, wanted, weights, PRE)


def test_projection_of_another_tensor_is_recognized():
    """The statement identifies an input without its norm and a tensor from a different layer."""
    key = f"{LAYER}.self_attention.key"

    def projected(read):
        def change(tensors, weights):
            kernel, bias = (weights.get(f"{key}_proj.{kind}", 0.0) for kind in ("kernel", "bias"))
            return split_heads(tensors[read] @ kernel + bias, PRE.num_heads)

        return change

    for read in (BEFORE, "target_embedding.output"):
        assert of_block(key, projected(read)) == f"the projection reads {read}"
    assert of_block(key, projected(f"{LAYER}.self_attention_norm.output")) == ""  # its correct input


def test_kernel_and_bias_of_another_projection_are_recognized():
    config = tiny(attention_bias=True, d_k=None, d_v=None)
    case = Case("full/padded", "full model", config, "", token_ids(config))
    block, wanted = f"{LAYER}.cross_attention", observed(TRUTH, case)
    actual = {**wanted, f"{block}.value": wanted[f"{block}.key"]}
    found = of_operands(f"{block}.value", actual, wanted, case.load_weights(), config)
    assert found == f"the projection uses the kernel and the bias of {block}.key_proj"


def test_projection_of_a_normalized_tensor_is_recognized():
    """Each decoder layer normalizes the memory a second time."""
    key, norm = f"{LAYER}.cross_attention.key", f"{LAYER}.cross_attention_norm"

    def change(tensors, weights):
        scale, bias = weights[f"{norm}.scale"], weights[f"{norm}.bias"]
        normed = layer_norm(tensors["encoder.output"], scale, bias, PRE.layer_norm_epsilon)
        return split_heads(normed @ weights[f"{key}_proj.kernel"], PRE.num_heads)

    assert of_block(key, change) == f"the projection reads {norm}(encoder.output)"


@pytest.mark.parametrize("name", ["encoder.output", f"{LAYER}.self_attention_norm.output"])
def test_norm_with_other_parameters_is_recognized(name):
    norm = "encoder.final_norm" if name == "encoder.output" else f"{LAYER}.self_attention_norm"

    def with_parameters(pick):
        def change(tensors, weights):
            scale, bias = weights[f"{norm}.scale"], weights[f"{norm}.bias"]
            factor, summand = pick(scale, bias)
            return (tensors[name] - bias) / scale * factor + summand

        return of_block(name, change)

    exchanged = with_parameters(lambda scale, bias: (bias, scale))
    assert exchanged == f"the norm multiplies by {norm}.bias and adds {norm}.scale"
    assert with_parameters(lambda scale, bias: (np.ones_like(scale), bias)).endswith(f"by 1 and adds {norm}.bias")
    assert with_parameters(lambda scale, bias: (scale**2, bias)) == ""


def test_feed_forward_network_on_the_residual_stream_is_recognized():
    terms = [BEFORE, f"{LAYER}.self_attention.output", f"{LAYER}.cross_attention.output"]

    def change(tensors, weights):
        block = f"{LAYER}.feed_forward.inner_proj"
        stream = sum(tensors[term] for term in terms)
        return ACTIVATIONS[PRE.activation](stream @ weights[f"{block}.kernel"] + weights[f"{block}.bias"])

    found = of_block(f"{LAYER}.feed_forward.inner", change)
    assert found == f"the projection reads the sum of {', '.join(terms)}"


def test_wrong_terms_of_a_residual_sum_are_measured():
    output, attended = f"{LAYER}.feed_forward.output", f"{LAYER}.self_attention.output"
    found = of_block(f"{LAYER}.output", lambda tensors, weights: tensors[f"{LAYER}.output"] - 0.5 * tensors[output])
    assert found == f"in the sum, {output} is added 0.5 times"
    found = of_block(f"{LAYER}.output", lambda tensors, weights: tensors[f"{LAYER}.output"] - tensors[attended])
    assert found == f"in the sum, {attended} is missing"
    noise = np.random.default_rng(0).normal(size=(4, 7, PRE.d_model))
    assert of_block(f"{LAYER}.output", lambda tensors, weights: tensors[f"{LAYER}.output"] + noise) == ""


def test_heads_merged_in_another_order_are_recognized():
    block = f"{LAYER}.cross_attention"

    def merged(merge):
        def change(tensors, weights):
            context = tensors[f"{block}.context"]  # [B, H, L, d]
            kernel, bias = (weights.get(f"{block}.output_proj.{kind}", 0.0) for kind in ("kernel", "bias"))
            return merge(context).reshape(context.shape[0], context.shape[2], -1) @ kernel + bias

        return of_block(f"{block}.output", change)

    assert merged(lambda x: x.transpose(0, 2, 3, 1)).endswith(
        f"{block}.context, merged channel by channel instead of head by head"
    )
    assert merged(lambda x: x).endswith(f"reads {block}.context, reshaped without a transpose")
    assert merged(lambda x: x.transpose(0, 2, 1, 3)) == ""


POST = tiny(d_k=None, d_v=None)
SUMS = [f"{LAYER}.self_attention_norm.output", f"{LAYER}.feed_forward.output", f"{LAYER}.cross_attention.output"]


@pytest.mark.parametrize(
    ("terms", "is_normed", "words"),
    [
        ([SUMS[0], SUMS[1]], True, f"the norm reads the sum of {SUMS[0]} and {SUMS[1]}"),
        ([SUMS[1]], True, f"the norm reads {SUMS[1]}"),
        ([f"{LAYER}.cross_attention_norm.output", SUMS[1]], False, "without a norm"),
        ([f"{LAYER}.cross_attention_norm.output", SUMS[1]], True, ""),
        ([SUMS[0], SUMS[1], SUMS[2]], True, ""),
    ],
)
def test_inputs_of_a_norm_are_recognized(terms, is_normed, words):
    norm = f"{LAYER}.feed_forward_norm"
    case = Case("full/padded", "full model", POST, "", token_ids(POST))
    weights, wanted = case.load_weights(), observed(TRUTH, case)
    x = sum(wanted[term] for term in terms)
    scale, bias = weights[f"{norm}.scale"], weights[f"{norm}.bias"]
    actual = layer_norm(x, scale, bias, POST.layer_norm_epsilon) if is_normed else x
    found = of_operands(f"{norm}.output", {**wanted, f"{norm}.output": actual}, wanted, weights, POST)
    assert found.endswith(words)
    assert bool(found) == bool(words)


def softmax(scores, axis=-1):
    weights = np.exp(scores - scores.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


@pytest.mark.parametrize("block", ["encoder.layers.0.self_attention", "decoder.layers.1.self_attention"])
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (lambda scores, allowed: softmax(np.where(allowed, scores, scores - 10.0)), "are shifted by -10"),
        (lambda scores, allowed: softmax(np.where(allowed, scores, 1e-9)), "are set to 1e-09"),
        (lambda scores, allowed: softmax(scores), "are shifted by 0: they are not masked"),
        (lambda scores, allowed: softmax(scores - 1e-12 * ~allowed), "are shifted by 0: they are not masked"),
        (lambda scores, allowed: softmax(np.where(allowed, scores, scores - 1e9), -2), "the wrong axis"),
        (lambda scores, allowed: softmax(np.where(allowed, scores, -np.inf)), ""),
        (lambda scores, allowed: softmax(np.where(allowed, scores, 0.5 * scores)), ""),
        (lambda scores, allowed: softmax(np.where(allowed, 2.0 * scores, 0.0)), ""),
    ],
)
def test_masked_scores_of_a_softmax_are_measured(block, weights, words):
    found = of_block(
        f"{block}.weights",
        lambda tensors, _: weights(tensors[f"{block}.scores"], tensors[f"{block}.weights"] > 0.0),
    )
    assert found.endswith(words)
    assert bool(found) == bool(words)
