"""The handwritten backward pass, which applies the chain rule from the logits back to the embedding matrices.

``dx`` is the gradient of the loss with respect to ``x``. Functions and layers define their backward pass next to their
forward pass (``functional``, ``attention``, ``layers``, ``embedding``). This module contains the backward passes of the
larger blocks. A backward function takes the inputs of its block and the gradient with respect to the output, and
returns the gradients with respect to the inputs. The function reads all other values of the forward pass from a
``Trace``. It also reports the gradients with respect to its taps and parameters to the same ``Trace``.

Axes: B batch, L query length, M memory length, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy import ndarray

from reference_numpy.attention import (
    MultiHeadAttention,
    merge_heads,
    scaled_dot_product_attention_backward,
    split_heads,
)
from reference_numpy.backward_checks import check_backward, check_seen
from reference_numpy.backward_trace import Activations, LayerInputs, Trace
from reference_numpy.decoder import DecoderLayer, DecoderStack
from reference_numpy.embedding import LearnedPosition
from reference_numpy.encoder import EncoderLayer, EncoderStack
from reference_numpy.feed_forward import GatedFeedForward, PositionwiseFeedForward
from reference_numpy.transformer import Transformer
from transformer_spec.names import parameter_shapes, tap_shapes
from transformer_spec.shapes import Float, Int
from transformer_spec.taps import Recorder


def multi_head_attention_backward(
    attention: MultiHeadAttention,
    query: Float[ndarray, "B L d_model"],
    memory: Float[ndarray, "B M d_model"],
    doutput: Float[ndarray, "B L d_model"],
    trace: Trace,
) -> tuple[Float[ndarray, "B L d_model"], Float[ndarray, "B M d_model"], Float[ndarray, "B H L M"]]:
    """Return the gradients with respect to ``query``, ``memory``, and the scores."""
    doutput = trace.note("output", doutput)
    joined = merge_heads(trace["context"])  # [B, L, H*d_v]
    djoined = attention.output_proj.backward(joined, doutput, trace.within("output_proj").note)
    dropout = partial(trace.dropout, "weights", rate=attention.dropout.rate)
    multiplier = 1.0 if attention.scale_scores else math.sqrt(trace["query"].shape[-1])
    heads = (multiplier * trace["query"], trace["key"], trace["value"], trace["weights"])
    dcontext = split_heads(djoined, attention.num_heads)
    dq, dk, dv, dscores = scaled_dot_product_attention_backward(*heads, dcontext, dropout, trace.note)
    dheads = {"query": multiplier * dq, "key": dk, "value": dv}
    dq, dk, dv = (merge_heads(trace.note(name, dhead)) for name, dhead in dheads.items())
    dquery = attention.query_proj.backward(query, dq, trace.within("query_proj").note)
    dmemory = attention.key_proj.backward(memory, dk, trace.within("key_proj").note)
    dmemory = dmemory + attention.value_proj.backward(memory, dv, trace.within("value_proj").note)
    return dquery, dmemory, dscores


def self_attention_backward(
    attention: MultiHeadAttention,
    x: Float[ndarray, "B L d_model"],
    doutput: Float[ndarray, "B L d_model"],
    trace: Trace,
    dbias: Float[ndarray, "1 H L L"] | None = None,
) -> Float[ndarray, "B L d_model"]:
    """Return the gradient with respect to ``x``, which is both the query and the memory.

    Also add the gradient with respect to the relative position bias to ``dbias``, in place.
    """
    dquery, dmemory, dscores = multi_head_attention_backward(attention, x, x, doutput, trace)
    if dbias is not None:
        dbias += dscores.sum(axis=0, keepdims=True)
    return dquery + dmemory


def feed_forward_backward(
    feed_forward: PositionwiseFeedForward,
    x: Float[ndarray, "B L d_model"],
    doutput: Float[ndarray, "B L d_model"],
    trace: Trace,
) -> Float[ndarray, "B L d_model"]:
    """Return the gradient with respect to ``x`` in ``activation(x W_1 + b_1) W_2 + b_2``, or in its gated variant."""
    dropout = partial(trace.dropout, "inner", rate=feed_forward.dropout.rate)
    doutput = trace.note("output", doutput)
    kept = dropout(trace["inner"])  # [B, L, d_ff]
    dkept = feed_forward.output_proj.backward(kept, doutput, trace.within("output_proj").note)
    dinner = trace.note("inner", dropout(dkept))
    if isinstance(feed_forward, GatedFeedForward):
        dgate = trace.note("gate", dinner * feed_forward.inner_proj(x))
        dactivated = feed_forward.gate_backward(x, dgate)
        dx = feed_forward.gate_proj.backward(x, dactivated, trace.within("gate_proj").note)
        return dx + feed_forward.inner_proj.backward(x, dinner * trace["gate"], trace.within("inner_proj").note)
    dprojected = feed_forward.activation_backward(x, trace["inner"], dinner)
    return feed_forward.inner_proj.backward(x, dprojected, trace.within("inner_proj").note)


SublayerBackward = Callable[[ndarray, ndarray, Trace], ndarray]


def residual_backward(
    layer: EncoderLayer | DecoderLayer,
    name: str,
    sublayer_backward: SublayerBackward,
    x: ndarray,
    dy: ndarray,
    trace: Trace,
) -> ndarray:
    """Return the gradient with respect to ``x``, the input of a residual connection.

    Post-norm is ``LayerNorm(x + Dropout(Sublayer(x)))``, and pre-norm is ``x + Dropout(Sublayer(LayerNorm(x)))``.

    Args:
        layer: Layer that contains the residual connection.
        name: Attribute name of the sublayer.
        sublayer_backward: Backward pass of the sublayer.
        x: Input of the residual connection.
        dy: Gradient with respect to the output.
        trace: Trace of the layer.
    """
    dropout = partial(trace.dropout, f"{name}.output", rate=layer.dropout.rate)
    norm, norm_trace, sublayer_trace = getattr(layer, f"{name}_norm"), trace.within(f"{name}_norm"), trace.within(name)
    if layer.norm_order == "post":
        total = x + dropout(sublayer_trace["output"])
        dtotal = norm.backward(total, norm_trace.note("output", dy), norm_trace.note)
        return dtotal + sublayer_backward(x, dropout(dtotal), sublayer_trace)
    dnormed = sublayer_backward(norm_trace["output"], dropout(dy), sublayer_trace)
    return dy + norm.backward(x, norm_trace.note("output", dnormed), norm_trace.note)


def _residual(layer, name, x, trace):
    """Return the output of the residual connection around a sublayer."""
    if layer.norm_order == "post":
        return trace[f"{name}_norm.output"]
    return x + trace.dropout(f"{name}.output", trace[f"{name}.output"], layer.dropout.rate)


def encoder_layer_backward(
    layer: EncoderLayer,
    x: Float[ndarray, "B S d_model"],
    doutput: Float[ndarray, "B S d_model"],
    trace: Trace,
    dbias: Float[ndarray, "1 H S S"] | None = None,
) -> Float[ndarray, "B S d_model"]:
    """Return the gradient with respect to ``x``, and add the gradient of the relative position bias to ``dbias``."""
    self_attention = partial(self_attention_backward, layer.self_attention, dbias=dbias)
    feed_forward = partial(feed_forward_backward, layer.feed_forward)
    attended = _residual(layer, "self_attention", x, trace)
    dattended = residual_backward(layer, "feed_forward", feed_forward, attended, trace.note("output", doutput), trace)
    return residual_backward(layer, "self_attention", self_attention, x, dattended, trace)


def encoder_backward(
    encoder: EncoderStack, x: Float[ndarray, "B S d_model"], doutput: Float[ndarray, "B S d_model"], trace: Trace
) -> Float[ndarray, "B S d_model"]:
    """Return the gradient with respect to the embedded source ``x``."""
    inputs = [x, *(trace[f"layers.{i}.output"] for i in range(len(encoder.layers)))]
    dx = trace.note("output", trace.dropout("output", doutput, encoder.dropout.rate))
    dbias = _zero_bias(encoder, trace)
    if encoder.final_norm is not None:
        dx = encoder.final_norm.backward(inputs[-1], dx, trace.within("final_norm").note)
    for i, layer in reversed([*enumerate(encoder.layers)]):
        dx = encoder_layer_backward(layer, inputs[i], dx, trace.of_layer(i, layer, inputs[i]), dbias)
    relative_bias_backward(encoder, dbias, trace)
    return dx


def _zero_bias(stack, trace):
    """Return zeros in the shape of the relative position bias, or None if the stack has no such bias."""
    return None if stack.relative_bias is None else np.zeros_like(trace["relative_bias.output"])


def relative_bias_backward(
    stack: EncoderStack | DecoderStack, dbias: Float[ndarray, "1 H L L"] | None, trace: Trace
) -> None:
    """Report the gradients with respect to the relative position bias and its table, if the stack has this bias."""
    if stack.relative_bias is not None and dbias is not None:
        positions = np.arange(dbias.shape[-1])
        dbias = trace.note("relative_bias.output", dbias)
        trace.note("relative_bias.table", stack.relative_bias.backward(positions - positions[:, None], dbias))


def decoder_layer_backward(
    layer: DecoderLayer,
    x: Float[ndarray, "B T d_model"],
    memory: Float[ndarray, "B S d_model"],
    doutput: Float[ndarray, "B T d_model"],
    trace: Trace,
    dbias: Float[ndarray, "1 H T T"] | None = None,
) -> tuple[Float[ndarray, "B T d_model"], Float[ndarray, "B S d_model"]]:
    """Return the gradients with respect to ``x`` and to the encoder memory.

    Also add the gradient with respect to the relative position bias to ``dbias``, in place.
    """
    dmemory = np.zeros_like(memory)

    def cross_attention(x: ndarray, doutput: ndarray, trace: Trace) -> ndarray:
        nonlocal dmemory
        dquery, dmemory, _ = multi_head_attention_backward(layer.cross_attention, x, memory, doutput, trace)
        return dquery

    feed_forward = partial(feed_forward_backward, layer.feed_forward)
    attended = x if layer.self_attention is None else _residual(layer, "self_attention", x, trace)
    informed = _residual(layer, "cross_attention", attended, trace)
    dx = trace.note("output", doutput)
    dx = residual_backward(layer, "feed_forward", feed_forward, informed, dx, trace)
    dx = residual_backward(layer, "cross_attention", cross_attention, attended, dx, trace)
    if layer.self_attention is not None:
        self_attention = partial(self_attention_backward, layer.self_attention, dbias=dbias)
        dx = residual_backward(layer, "self_attention", self_attention, x, dx, trace)
    return dx, dmemory


def decoder_backward(
    decoder: DecoderStack,
    x: Float[ndarray, "B T d_model"],
    memory: Float[ndarray, "B S d_model"],
    doutput: Float[ndarray, "B T d_model"],
    trace: Trace,
) -> tuple[Float[ndarray, "B T d_model"], Float[ndarray, "B S d_model"]]:
    """Return the gradients with respect to the embedded target ``x`` and to the encoder memory."""
    inputs = [x, *(trace[f"layers.{i}.output"] for i in range(len(decoder.layers)))]
    dx = trace.note("output", trace.dropout("output", doutput, decoder.dropout.rate))
    dbias, dmemory = _zero_bias(decoder, trace), np.zeros_like(memory)
    if decoder.final_norm is not None:
        dx = decoder.final_norm.backward(inputs[-1], dx, trace.within("final_norm").note)
    for i, layer in reversed([*enumerate(decoder.layers)]):
        layer_trace = trace.of_layer(i, layer, inputs[i], memory)
        dx, from_layer = decoder_layer_backward(layer, inputs[i], memory, dx, layer_trace, dbias)
        dmemory = dmemory + from_layer
    relative_bias_backward(decoder, dbias, trace)
    return dx, dmemory


def embedding_backward(
    model: Transformer,
    side: str,
    ids: Int[ndarray, "B L"],
    dx: Float[ndarray, "B L d_model"],
    dtable: Float[ndarray, "V d_model"],
    trace: Trace,
) -> None:
    """Add the gradient with respect to the embedding matrix of ``source`` or ``target`` to ``dtable``."""
    names = (f"{side}_embedding", f"{side}_position", f"{side}_embedding_norm")
    embedding, position, norm = (getattr(model, name) for name in names)
    output = f"{side}_embedding.output"
    dx = trace.note(output, trace.dropout(output, dx, model.dropout.rate))
    if norm is not None:
        dx = norm.backward(position(embedding(ids)), dx, trace.within(f"{side}_embedding_norm").note)
    if isinstance(position, LearnedPosition):
        trace.note(f"{side}_position.table", position.backward(dx))
    embedding.backward(ids, dx, dtable)


def transformer_backward(
    model: Transformer,
    source_ids: Int[ndarray, "B S"],
    target_ids: Int[ndarray, "B T"],
    dlogits: Float[ndarray, "B T V"],
    seen: Mapping[str, ndarray],
    found: Recorder | None = None,
) -> tuple[dict[str, ndarray], dict[str, ndarray]]:
    """Return the gradients with respect to parameters and taps, ordered as in ``parameter_shapes`` and ``tap_shapes``.

    The gradient with respect to a tap is the gradient with respect to the value that the tap returned. If there is no
    operation between two taps, their gradients are the same array.

    Args:
        model: Model, which must not have changed since the forward pass.
        source_ids: Source token IDs of the forward pass.
        target_ids: Target token IDs that the decoder read in the forward pass.
        dlogits: Gradient of the loss with respect to the logits.
        seen: Tap that was passed to the forward pass. It must be an ``Activations`` or ``LayerInputs`` object, or a
            ``Recorder`` that stores all values, including the dropout masks. It must return all values unchanged,
            except the dropout masks.
        found: ``Recorder`` that is called with each name and gradient. Its return value replaces the gradient. If the
            ``Recorder`` doesn't store a gradient, the result omits this gradient. If None, all gradients are
            recorded.

    Returns:
        Two dicts: the gradients with respect to the parameters, and the gradients with respect to the taps.

    Raises:
        ValueError: If the value of a tap is missing from ``seen``, if ``seen`` replaced a value that is not a dropout
            mask, or if a layer overrides only its forward pass.
    """
    check_backward(model)
    check_seen(seen)
    (batch, source_length), target_length = source_ids.shape, target_ids.shape[1]
    taps = tap_shapes(model.config, batch, source_length, target_length)
    if missing := [name for name in taps if name not in seen and not _is_left_out(seen, name)]:
        raise ValueError(f"seen must contain every tap: {len(missing)} are missing, including {missing[0]}")
    found = Recorder() if found is None else found
    trace = Trace(seen, found)
    source, target = (
        trace.dropout(name, seen[name], model.dropout.rate)
        for name in ("source_embedding.output", "target_embedding.output")
    )
    states, memory = (
        trace.dropout(f"{name}.output", seen[f"{name}.output"], getattr(model, name).dropout.rate)
        for name in ("decoder", "encoder")
    )
    dlogits = trace.note("logits", dlogits)
    multiplier = model.config.d_model**-0.5 if model.config.scale_logits else 1.0
    states = multiplier * states
    dstates, dtable = model.output_proj.backward(states, dlogits, trace.within("output_proj").note)
    dstates = multiplier * dstates
    dtarget, dmemory = decoder_backward(model.decoder, target, memory, dstates, trace.within("decoder"))
    dsource = encoder_backward(model.encoder, source, dmemory, trace.within("encoder"))
    # The gradient of a tied matrix is the sum of the gradients from all its uses.
    dtarget_table = np.zeros_like(model.target_embedding.table) if dtable is None else dtable
    tied = model.target_embedding is model.source_embedding
    dsource_table = dtarget_table if tied else np.zeros_like(model.source_embedding.table)
    embedding_backward(model, "target", target_ids, dtarget, dtarget_table, trace)
    embedding_backward(model, "source", source_ids, dsource, dsource_table, trace)
    if not tied:
        trace.note("target_embedding.table", dtarget_table)
    trace.note("source_embedding.table", dsource_table)
    parameters = {name: found[name] for name in parameter_shapes(model.config) if name in found}
    return parameters, {name: found[name] for name in taps if name in found}


def _is_left_out(seen: Mapping[str, ndarray], name: str) -> bool:
    """Return whether a tap is missing from ``seen`` because the class of ``seen`` stores only some of the taps."""
    return isinstance(seen, Activations | LayerInputs) and not seen.reads(name)
