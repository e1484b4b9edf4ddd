"""The backward pass, by hand: the chain rule walked through the model from the loss to the tables.

``of_x`` is the gradient of the loss with regard to ``x``; ``<name>_backward`` undoes ``<name>``, takes the gradient of
what that returned and returns the gradients of what it read. What the forward pass computed is not kept anywhere but
in its taps: a Recorder holds all that is needed, but for sums and activations that are cheap to do again.

B batch, H heads, L query length, M memory length, S source length, T target length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy import ndarray

from reference_numpy.attention import MultiHeadAttention, merge_heads, split_heads
from reference_numpy.backward_functions import (
    ACTIVATIONS_BACKWARD,
    layer_norm_backward,
    linear_backward,
    lookup_backward,
    scaled_dot_product_attention_backward,
)
from reference_numpy.backward_trace import Activations, LayerInputs, Trace
from reference_numpy.decoder import DecoderLayer, DecoderStack
from reference_numpy.embedding import LearnedPosition, OutputProjection, TokenEmbedding
from reference_numpy.encoder import EncoderLayer, EncoderStack
from reference_numpy.feed_forward import PositionwiseFeedForward
from reference_numpy.functional import ACTIVATIONS, relu
from reference_numpy.layers import LayerNorm, Linear
from reference_numpy.transformer import Transformer
from transformer_spec.names import parameter_shapes, tap_shapes
from transformer_spec.shapes import Float, Int
from transformer_spec.taps import Recorder


def multi_head_attention_backward(
    attention: MultiHeadAttention,
    query: Float[ndarray, "B L d_model"],
    memory: Float[ndarray, "B M d_model"],
    of_output: Float[ndarray, "B L d_model"],
    trace: Trace,
) -> tuple[Float[ndarray, "B L d_model"], Float[ndarray, "B M d_model"]]:
    """Return the gradients of query and memory, the inputs of the attention."""

    def thin_out(x: ndarray) -> ndarray:
        return trace.dropout("weights", x, attention.dropout.rate)

    of_output = trace.note("output", of_output)
    joined = merge_heads(trace["context"])  # [B, L, H*d_v]
    of_joined = _through_linear(attention.output_proj, joined, of_output, trace.within("output_proj"))
    of_context = split_heads(of_joined, attention.num_heads)
    heads = (trace["query"], trace["key"], trace["value"])
    q, k, v = scaled_dot_product_attention_backward(*heads, trace["weights"], of_context, thin_out, trace.note)
    q, k, v = (merge_heads(trace.note(name, x)) for name, x in (("query", q), ("key", k), ("value", v)))
    of_query = _through_linear(attention.query_proj, query, q, trace.within("query_proj"))
    of_memory = _through_linear(attention.key_proj, memory, k, trace.within("key_proj"))
    of_memory += _through_linear(attention.value_proj, memory, v, trace.within("value_proj"))
    return of_query, of_memory


def self_attention_backward(
    attention: MultiHeadAttention,
    x: Float[ndarray, "B L d_model"],
    of_output: Float[ndarray, "B L d_model"],
    trace: Trace,
) -> Float[ndarray, "B L d_model"]:
    """Return the gradient of ``x``, which is query and memory at once."""
    of_query, of_memory = multi_head_attention_backward(attention, x, x, of_output, trace)
    return of_query + of_memory


def feed_forward_backward(
    feed_forward: PositionwiseFeedForward,
    x: Float[ndarray, "B L d_model"],
    of_output: Float[ndarray, "B L d_model"],
    trace: Trace,
) -> Float[ndarray, "B L d_model"]:
    """Return the gradient of ``x`` in ``max(0, x W_1 + b_1) W_2 + b_2``, or with another activation."""
    rate = feed_forward.dropout.rate
    inner, inner_proj = trace["inner"], feed_forward.inner_proj  # [B, L, d_ff]
    thinned = trace.dropout("inner", inner, rate)
    of_output = trace.note("output", of_output)
    of_thinned = _through_linear(feed_forward.output_proj, thinned, of_output, trace.within("output_proj"))
    of_inner = trace.note("inner", trace.dropout("inner", of_thinned, rate))
    activation = ACTIVATIONS[feed_forward.activation]
    activated = inner if activation is relu else inner_proj(x)  # the sign is all that a ReLU's gradient needs
    of_activated = ACTIVATIONS_BACKWARD[activation](activated, of_inner)
    return _through_linear(inner_proj, x, of_activated, trace.within("inner_proj"))


def token_embedding_backward(
    embedding: TokenEmbedding,
    ids: Int[ndarray, "B L"],
    of_vectors: Float[ndarray, "B L d_model"],
    of_table: Float[ndarray, "V d_model"] | None = None,
) -> Float[ndarray, "V d_model"]:
    """Return the gradient of the table, added to what other uses of the table brought, which then is no more."""
    of_table = np.zeros_like(embedding.table) if of_table is None else of_table
    lookup_backward(ids, of_vectors * embedding.multiplier, of_table)
    return of_table


def learned_position_backward(
    position: LearnedPosition, of_x: Float[ndarray, "B L d_model"]
) -> Float[ndarray, "max_length d_model"]:
    """Return the gradient of the table; that of the vectors it was added to is ``of_x`` itself."""
    of_table = np.zeros_like(position.table)
    of_table[position.offset : position.offset + of_x.shape[1]] = of_x.sum(axis=0)
    return of_table


def output_projection_backward(
    projection: OutputProjection,
    x: Float[ndarray, "B L d_model"],
    of_logits: Float[ndarray, "B L V"],
    trace: Trace,
) -> tuple[Float[ndarray, "B L d_model"], Float[ndarray, "V d_model"] | None]:
    """Return the gradients of ``x`` and of the table, None where the projection has a matrix of its own."""
    kernel = projection.table.T if projection.kernel is None else projection.kernel  # type: ignore[union-attr]
    of_x, of_kernel, of_bias = linear_backward(x, kernel, of_logits)
    if projection.bias is not None:
        trace.note("bias", of_bias)
    if projection.kernel is None:
        return of_x, of_kernel.T
    trace.note("kernel", of_kernel)
    return of_x, None


def encoder_layer_backward(
    layer: EncoderLayer, x: Float[ndarray, "B S d_model"], of_output: Float[ndarray, "B S d_model"], trace: Trace
) -> Float[ndarray, "B S d_model"]:
    """Return the gradient of ``x``."""
    self_attention = partial(self_attention_backward, layer.self_attention)
    feed_forward = partial(feed_forward_backward, layer.feed_forward)
    attended = _residual(layer, "self_attention", x, trace)
    of_x = trace.note("output", of_output)
    of_x = _through_residual(layer, "feed_forward", feed_forward, attended, of_x, trace)
    return _through_residual(layer, "self_attention", self_attention, x, of_x, trace)


def encoder_backward(
    encoder: EncoderStack, x: Float[ndarray, "B S d_model"], of_output: Float[ndarray, "B S d_model"], trace: Trace
) -> Float[ndarray, "B S d_model"]:
    """Return the gradient of ``x``, the embedded source."""
    read = [x, *(trace[f"layers.{i}.output"] for i in range(len(encoder.layers)))]
    of_x = trace.note("output", of_output)
    if encoder.final_norm is not None:
        of_x = _through_norm(encoder.final_norm, read[-1], of_x, trace.within("final_norm"))
    for i, layer in reversed([*enumerate(encoder.layers)]):
        of_x = encoder_layer_backward(layer, read[i], of_x, trace.of_layer(i, layer, read[i]))
    return of_x


def decoder_layer_backward(
    layer: DecoderLayer,
    x: Float[ndarray, "B T d_model"],
    memory: Float[ndarray, "B S d_model"],
    of_output: Float[ndarray, "B T d_model"],
    trace: Trace,
) -> tuple[Float[ndarray, "B T d_model"], Float[ndarray, "B S d_model"]]:
    """Return the gradients of ``x`` and of the memory."""
    of_memory = np.zeros_like(memory)

    def cross_attention(x: ndarray, of_output: ndarray, trace: Trace) -> ndarray:
        nonlocal of_memory
        of_query, of_memory = multi_head_attention_backward(layer.cross_attention, x, memory, of_output, trace)
        return of_query

    feed_forward = partial(feed_forward_backward, layer.feed_forward)
    attended = x if layer.self_attention is None else _residual(layer, "self_attention", x, trace)
    informed = _residual(layer, "cross_attention", attended, trace)
    of_x = trace.note("output", of_output)
    of_x = _through_residual(layer, "feed_forward", feed_forward, informed, of_x, trace)
    of_x = _through_residual(layer, "cross_attention", cross_attention, attended, of_x, trace)
    if layer.self_attention is not None:
        self_attention = partial(self_attention_backward, layer.self_attention)
        of_x = _through_residual(layer, "self_attention", self_attention, x, of_x, trace)
    return of_x, of_memory


def decoder_backward(
    decoder: DecoderStack,
    x: Float[ndarray, "B T d_model"],
    memory: Float[ndarray, "B S d_model"],
    of_output: Float[ndarray, "B T d_model"],
    trace: Trace,
) -> tuple[Float[ndarray, "B T d_model"], Float[ndarray, "B S d_model"]]:
    """Return the gradients of ``x``, the embedded target, and of the memory, which every layer reads."""
    read = [x, *(trace[f"layers.{i}.output"] for i in range(len(decoder.layers)))]
    of_memory = np.zeros_like(memory)
    of_x = trace.note("output", of_output)
    if decoder.final_norm is not None:
        of_x = _through_norm(decoder.final_norm, read[-1], of_x, trace.within("final_norm"))
    for i, layer in reversed([*enumerate(decoder.layers)]):
        layer_trace = trace.of_layer(i, layer, read[i], memory)
        of_x, from_layer = decoder_layer_backward(layer, read[i], memory, of_x, layer_trace)
        of_memory += from_layer
    return of_x, of_memory


def transformer_backward(
    model: Transformer,
    source_ids: Int[ndarray, "B S"],
    target_ids: Int[ndarray, "B T"],
    of_logits: Float[ndarray, "B T V"],
    seen: Mapping[str, ndarray],
    found: Recorder | None = None,
    room: Mapping[str, ndarray] | None = None,
) -> tuple[dict[str, ndarray], dict[str, ndarray]]:
    """Return the gradient at every parameter and at every tap, in the order of their names.

    The gradient at a tap is that of the value which the tap passed on. Where nothing lies between two taps, both have
    the same array.

    Args:
        model: The model, as it was in the forward pass.
        source_ids: The source sentences of the forward pass.
        target_ids: The target sentences of the forward pass.
        of_logits: The gradient of the loss at the logits.
        seen: The tap of the forward pass: a Recorder that kept everything, with dropout what stayed too; or one of
            ``Activations`` or ``LayerInputs``.
        found: Receives each named gradient and returns the one to go on with. What it does not keep of the gradients
            at taps is left out of what is returned. None keeps everything, and goes on with what was computed.
        room: Gradients at parameters that nobody needs any more, in whose place new ones go: fresh memory takes time.

    Raises:
        ValueError: A tap is missing.
    """
    (batch, source_length), target_length = source_ids.shape, target_ids.shape[1]
    taps = tap_shapes(model.config, batch, source_length, target_length)
    if missing := [name for name in taps if name not in seen and not _is_left_out(seen, name)]:
        raise ValueError(f"seen must hold every tap: {len(missing)} are missing, the first is {missing[0]}")
    found = Recorder() if found is None else found
    trace = Trace(seen, found, room=room or {})
    rate = model.dropout.rate
    source, target = (
        trace.dropout(name, seen[name], rate) for name in ("source_embedding.output", "target_embedding.output")
    )
    of_logits = trace.note("logits", of_logits)
    of_states, of_output_table = output_projection_backward(
        model.output_proj, seen["decoder.output"], of_logits, trace.within("output_proj")
    )
    of_target, of_memory = decoder_backward(
        model.decoder, target, seen["encoder.output"], of_states, trace.within("decoder")
    )
    of_source = encoder_backward(model.encoder, source, of_memory, trace.within("encoder"))
    of_target = _through_embedding_sum(model, "target", target_ids, of_target, trace)
    of_source = _through_embedding_sum(model, "source", source_ids, of_source, trace)
    # A tied table sums up all that it is used for.
    of_target_table = token_embedding_backward(model.target_embedding, target_ids, of_target, of_output_table)
    tied = model.target_embedding is model.source_embedding
    if not tied:
        trace.note("target_embedding.table", of_target_table)
    of_shared = of_target_table if tied else None
    trace.note(
        "source_embedding.table", token_embedding_backward(model.source_embedding, source_ids, of_source, of_shared)
    )
    return {name: found[name] for name in parameter_shapes(model.config)}, {
        name: found[name] for name in taps if name in found
    }


def _is_left_out(seen: Mapping[str, ndarray], name: str) -> bool:
    """Return whether a tap is one that is left out on purpose."""
    return isinstance(seen, Activations | LayerInputs) and not seen.reads(name)


def _through_embedding_sum(
    model: Transformer, side: str, ids: Int[ndarray, "B L"], of_x: Float[ndarray, "B L d_model"], trace: Trace
) -> Float[ndarray, "B L d_model"]:
    """Return the gradient of the embedded tokens, to which positions were added; dropout and norm came after."""
    of_x = trace.note(f"{side}_embedding.output", trace.dropout(f"{side}_embedding.output", of_x, model.dropout.rate))
    embedding, position, norm = (
        getattr(model, f"{side}_{part}") for part in ("embedding", "position", "embedding_norm")
    )
    if norm is not None:
        of_x = _through_norm(norm, position(embedding(ids)), of_x, trace.within(f"{side}_embedding_norm"))
    if isinstance(position, LearnedPosition):
        trace.note(f"{side}_position.table", learned_position_backward(position, of_x))
    return of_x


def _residual(layer: EncoderLayer | DecoderLayer, name: str, x: ndarray, trace: Trace) -> ndarray:
    """Return what came out of a sub-layer's residual connection, given what went in."""
    if layer.norm_order == "post":
        return trace[f"{name}_norm.output"]
    return x + trace.dropout(f"{name}.output", trace[f"{name}.output"], layer.dropout.rate)


def _through_residual(layer, name, sublayer_backward, x, of_y, trace):
    """Return the gradient of what went into a sub-layer's residual connection."""

    def thin_out(gradient_or_value: ndarray) -> ndarray:
        return trace.dropout(f"{name}.output", gradient_or_value, layer.dropout.rate)

    norm, norm_trace, sublayer_trace = getattr(layer, f"{name}_norm"), trace.within(f"{name}_norm"), trace.within(name)
    if layer.norm_order == "post":  # y = LayerNorm(x + Dropout(Sublayer(x)))
        of_y = norm_trace.note("output", of_y)
        of_sum = _through_norm(norm, x + thin_out(sublayer_trace["output"]), of_y, norm_trace)
        return of_sum + sublayer_backward(x, thin_out(of_sum), sublayer_trace)
    # y = x + Dropout(Sublayer(LayerNorm(x)))
    of_normed = norm_trace.note("output", sublayer_backward(norm_trace["output"], thin_out(of_y), sublayer_trace))
    return of_y + _through_norm(norm, x, of_normed, norm_trace)


def _through_linear(linear: Linear, x: ndarray, of_y: ndarray, trace: Trace) -> ndarray:
    """Return the gradient of what a linear layer read; note those of its parameters."""
    of_x, of_kernel, of_bias = linear_backward(x, linear.kernel, of_y, trace.room.get(f"{trace.path}kernel"))
    trace.note("kernel", of_kernel)
    if linear.bias is not None:
        trace.note("bias", of_bias)
    return of_x


def _through_norm(norm: LayerNorm, x: ndarray, of_y: ndarray, trace: Trace) -> ndarray:
    """Return the gradient of what a norm read; note those of its parameters."""
    of_x, of_scale, of_bias = layer_norm_backward(x, norm.scale, norm.epsilon, of_y, norm.kind)
    trace.note("scale", of_scale)
    trace.note("bias", of_bias)
    return of_x
