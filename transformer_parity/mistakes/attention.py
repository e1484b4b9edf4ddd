"""Mistakes of attention: heads, scores, masks, rows that are masked entirely, and fused kernels."""

from __future__ import annotations

from dataclasses import replace

from transformer_parity.cases.standard import preset_case
from transformer_parity.mistakes.mistake import (
    CAUSAL,
    CROSS,
    SELF,
    Edits,
    Mistake,
    in_ports_alone,
    instead,
    swapped,
    together,
)

# Lines of the ports that more than one mistake edits.
SPLIT = {
    "numpy": "x.reshape(batch, length, num_heads, width // num_heads).transpose(0, 2, 1, 3)",
    "torch": "x.view(batch, length, num_heads, width // num_heads).transpose(1, 2)",
    "jax": "x.reshape(batch, length, num_heads, width // num_heads).transpose(0, 2, 1, 3)",
    "tf": "tf.transpose(tf.reshape(x, [batch, length, num_heads, width // num_heads]), [0, 2, 1, 3])",
}
MINIMUM = "np.fmin(scores, np.where(mask, infinity, -infinity), out=out)"
LOWEST = {
    "torch": "torch.finfo(scores.dtype).min",
    "jax": "jnp.finfo(wide.dtype).min",
    "tf": "tf.constant(wide.dtype.min, wide.dtype)",
}
ZEROED = {
    "torch": "weights.masked_fill(~mask, 0.0)",
    "jax": "jnp.where(mask, weights, 0.0)",
    "tf": "tf.where(mask, weights, tf.zeros([], wide.dtype))",
}
WIDENED = {
    "torch": "torch.promote_types(scores.dtype, torch.float32)",
    "jax": "jnp.promote_types(scores.dtype, jnp.float32)",
    "tf": 'keras.backend.result_type(scores.dtype, "float32")',
}


def softmax_over(axis: int) -> Edits:
    """Return edits that normalise the scores over another axis."""
    return {
        "numpy": [
            ("functional", "np.fmax.reduce(scores, axis=-1", f"np.fmax.reduce(scores, axis={axis}"),
            ("functional", "sum_last(weights)", f"weights.sum(axis={axis}, keepdims=True)"),
        ],
        "torch": [
            ("layers", "scores.softmax(-1", f"scores.softmax({axis}"),
            ("layers", ".min).softmax(-1", f".min).softmax({axis}"),
        ],
        "jax": [
            ("layers", "softmax(wide)", f"softmax(wide, axis={axis})"),
            ("layers", f"{LOWEST['jax']}))", f"{LOWEST['jax']}), axis={axis})"),
        ],
        "tf": [
            ("layers", "softmax(wide)", f"softmax(wide, axis={axis})"),
            ("layers", f"{LOWEST['tf']}))", f"{LOWEST['tf']}), axis={axis})"),
        ],
    }


def causal(numpy: str, torch: str, tf: str) -> Edits:
    """Return edits that allow other pairs than the lower triangle; JAX writes it as NumPy does."""
    lines = {
        "numpy": "np.tri(length, dtype=bool)",
        "torch": ".tril()",
        "jax": "jnp.tri(length, dtype=bool)",
        "tf": "positions[:, None] >= positions[None, :]",
    }
    return instead("masks", lines, numpy=numpy, torch=torch, jax=f"j{numpy}", tf=tf)


def without_bias(projection: str, x: str) -> Edits:
    """Return edits that leave out the bias of one of the attention's projections."""
    kernel = f"self.{projection}.kernel"
    torch, jax = f"{x} @ self.{projection}.weight.T", f"{x} @ {kernel}[...]"
    own = f"{x} @ {kernel}"
    return instead("attention", f"self.{projection}({x})", numpy=own, torch=torch, jax=jax, tf=own)


def forbidden(score: str) -> Edits:
    """Return edits that give forbidden keys another score; where all are forbidden, they share the weight."""
    ports = instead("layers", LOWEST, torch=score, jax=score, tf=f"tf.constant({score}, wide.dtype)")
    numpy = [("functional", MINIMUM, f"np.where(mask, scores, {score})")]
    return {**together(ports, instead("layers", ZEROED, "weights")), "numpy": numpy}


CATALOGUE = {
    "attention": [
        Mistake("scores not scaled", f"{SELF}.scores", instead("attention", "1.0 / math.sqrt(d_k)", "1.0")),
        Mistake("scores over d_k", f"{SELF}.scores", instead("attention", "math.sqrt(d_k)", "d_k")),
        Mistake(
            "scores over sqrt(d_model)",
            f"{SELF}.scores",
            instead("attention", "math.sqrt(d_k)", "math.sqrt(query.shape[1] * d_k)"),
        ),
        Mistake(
            "scores over sqrt(d_v)",
            f"{SELF}.scores",
            instead("attention", "d_k = query.shape[-1]", "d_k = value.shape[-1]"),
            unseen=("preset/torch",),
        ),
        Mistake("softmax over the heads", f"{SELF}.weights", softmax_over(1)),
        Mistake("softmax over the queries", f"{SELF}.weights", softmax_over(-2)),
        Mistake(
            "heads split as (d, h)",
            f"{SELF}.query",
            instead(
                "attention",
                SPLIT,
                numpy="x.reshape(batch, length, width // num_heads, num_heads).transpose(0, 3, 1, 2)",
                torch="x.view(batch, length, width // num_heads, num_heads).permute(0, 3, 1, 2)",
                jax="x.reshape(batch, length, width // num_heads, num_heads).transpose(0, 3, 1, 2)",
                tf="tf.transpose(tf.reshape(x, [batch, length, width // num_heads, num_heads]), [0, 3, 1, 2])",
            ),
        ),
        Mistake(
            "heads split without a transpose",
            f"{SELF}.query",
            instead(
                "attention",
                SPLIT,
                numpy="x.reshape(batch, num_heads, length, width // num_heads)",
                torch="x.view(batch, num_heads, length, width // num_heads)",
                jax="x.reshape(batch, num_heads, length, width // num_heads)",
                tf="tf.reshape(x, [batch, num_heads, length, width // num_heads])",
            ),
        ),
        Mistake(
            "heads merged without a transpose",
            f"{SELF}.output",
            {
                "numpy": [("attention", "x.transpose(0, 2, 1, 3).reshape(", "x.reshape(")],
                "torch": [("attention", "x.transpose(1, 2).reshape(", "x.reshape(")],
                "jax": [("attention", "x.transpose(0, 2, 1, 3).reshape(", "x.reshape(")],
                "tf": [("attention", "tf.transpose(x, [0, 2, 1, 3])", "x")],
            },
        ),
        Mistake(
            "W_o transposed",
            f"{SELF}.output",
            instead(
                "attention",
                "self.output_proj(merge_heads(context))",
                numpy="(merge_heads(context) @ self.output_proj.kernel.T"
                " + (0.0 if self.output_proj.bias is None else self.output_proj.bias))",
                torch="(merge_heads(context) @ self.output_proj.weight + self.output_proj.bias)",
                jax="(merge_heads(context) @ self.output_proj.kernel[...].T + self.output_proj.bias[...])",
                tf="merge_heads(context) @ tf.transpose(self.output_proj.kernel) + self.output_proj.bias",
            ),
            case="preset/torch",  # d_v 8: the matrix is square
        ),
        Mistake("key bias missing", f"{SELF}.key", without_bias("key_proj", "memory"), case="preset/torch"),
        Mistake("value bias missing", f"{SELF}.value", without_bias("value_proj", "memory"), case="preset/torch"),
        Mistake(
            "queries and memory of cross-attention swapped",
            f"{CROSS}.query",
            instead("decoder", "self.cross_attention(x, memory,", "self.cross_attention(memory, x,"),
            case="full/source_as_long_as_target",
        ),
        Mistake(
            "W_q and W_k of cross-attention swapped",
            f"{CROSS}.query",
            convert=swapped(f"{CROSS}.query_proj.kernel", f"{CROSS}.key_proj.kernel"),
        ),
    ],
    "mask": [
        Mistake(
            "no causal mask",
            f"{CAUSAL}.weights",
            causal("np.ones((length, length), bool)", "", "positions[:, None] >= 0 * positions[None, :]"),
        ),
        Mistake(
            "causal mask negated",
            f"{CAUSAL}.weights",
            instead("transformer", "self_mask = causal_mask(", "self_mask = ~causal_mask("),
        ),
        Mistake(
            "causal mask of the upper triangle",
            f"{CAUSAL}.weights",
            causal("np.tri(length, dtype=bool).T", ".triu()", "positions[:, None] <= positions[None, :]"),
        ),
        Mistake(
            "a position does not attend to itself",
            f"{CAUSAL}.weights",
            causal("np.tri(length, k=-1, dtype=bool)", ".tril(-1)", "positions[:, None] > positions[None, :]"),
        ),
        Mistake(
            "a position attends to the next one",
            f"{CAUSAL}.weights",
            causal("np.tri(length, k=1, dtype=bool)", ".tril(1)", "positions[:, None] + 1 >= positions[None, :]"),
        ),
        Mistake(
            "encoder without padding mask",
            f"{SELF}.weights",
            instead("transformer", "self.encoder(x, source_mask[", "self.encoder(x, (source_mask | True)["),
        ),
        Mistake(
            "cross-attention without padding mask",
            f"{CROSS}.weights",
            instead("transformer", "cross_mask = source_mask[:, None, None, :]", "cross_mask = None"),
        ),
        Mistake(
            "decoder without padding mask",
            f"{CAUSAL}.weights",
            instead("transformer", " & target_mask[:, None, None, :]", "[None, None]"),
        ),
        Mistake(
            "forbidden scores are zero",
            f"{SELF}.weights",
            forbidden("0.0"),
        ),
    ],
}

FULLY_MASKED = [
    Mistake(name, at, edits, case=case, detail=detail, unseen=("full/padded",))
    for case, at in (
        ("attention/fully_masked_row", "weights"),
        ("attention/nothing_allowed", "weights"),
        ("full/source_all_padding", f"{SELF}.weights"),
    )
    for name, detail, edits in (
        ("forbidden keys share the weight", "", forbidden("-1e9")),
        (
            "softmax of nothing but -inf",
            "values are NaN or infinite",
            in_ports_alone(forbidden('float("-inf")')),
        ),
    )
]

# No standard model with a fast path has dropout on the attention, or the equal d_k and d_v that JAX's own needs.
FUSED_CASE = replace(preset_case("torch"), name="preset/torch, fast", fast=True)
FUSED = "F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate)"
D_K = "    d_k = query.shape[-1]\n"
FAST = [
    # With taps on, the result is right.
    Mistake(name, "output", {port: [("attention", old, new)]}, case=case, path="fast")
    for port, name, case, old, new in (
        ("torch", "fused kernel without the mask", "full/padded", FUSED, FUSED.replace("mask", "None")),
        ("torch", "fused kernel without the scale", "full/padded", FUSED, FUSED.replace("rate", "rate, scale=1.0")),
        (
            "torch",
            "fused kernel that is causal by itself",
            "full/padded",
            FUSED,
            FUSED.replace("mask", "None").replace("rate", "rate, is_causal=query.shape == key.shape"),
        ),
        (
            "torch",
            "fused kernel with a mask to add",
            "full/source_all_padding",
            FUSED,
            FUSED.replace("mask", "None if mask is None else (~mask).to(query.dtype) * -1e9"),
        ),
        ("torch", "fused kernel that always drops", FUSED_CASE.name, " and dropout.training", ""),
        (
            "jax",
            "JAX's own attention",
            FUSED_CASE.name,
            D_K,
            f"""    if tap is no_tap:
        from jax.nn import dot_product_attention

        query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
        return dot_product_attention(query, key, value, mask=mask).transpose(0, 2, 1, 3)
{D_K}""",
        ),
        (
            "tf",
            "Keras' own attention",
            FUSED_CASE.name,
            D_K,
            f"""    if tap is no_tap:
        query, key, value = (tf.transpose(x, [0, 2, 1, 3]) for x in (query, key, value))
        return tf.transpose(keras.ops.dot_product_attention(query, key, value, mask=mask), [0, 2, 1, 3])
{D_K}""",
        ),
    )
]
