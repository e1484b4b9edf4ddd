"""Bugs in attention: heads, scores, masks, fully masked rows, and fused kernels."""

from __future__ import annotations

from dataclasses import replace

from transformer_parity.transformer.bugs.bug import (
    CAUSAL,
    CROSS,
    SELF,
    Bug,
    Edits,
    Table,
    but,
    changed,
    in_ports_alone,
    instead,
    swapped,
    table,
    together,
)
from transformer_parity.transformer.cases.standard import preset_case

# Each of these source lines is edited by multiple bugs.
SPLIT = {
    "numpy": "x.reshape(batch, length, num_heads, width // num_heads).transpose(0, 2, 1, 3)",
    "torch": "x.view(batch, length, num_heads, width // num_heads).transpose(1, 2)",
    "jax": "x.reshape(batch, length, num_heads, width // num_heads).transpose(0, 2, 1, 3)",
    "tf": "tf.transpose(tf.reshape(x, [batch, length, num_heads, width // num_heads]), [0, 2, 1, 3])",
}
MASKED = "np.where(mask, scores, -np.inf)"
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
    """Return edits that apply the softmax over a different axis of the scores."""
    return {
        "numpy": [
            ("functional", "scores.max(axis=-1", f"scores.max(axis={axis}"),
            ("functional", "np.maximum(weights.sum(axis=-1", f"np.maximum(weights.sum(axis={axis}"),
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
    """Return edits that replace the causal mask. The expression for JAX is derived from the expression for NumPy."""
    lines = {
        "numpy": "np.tri(length, dtype=bool)",
        "torch": ".tril()",
        "jax": "jnp.tri(length, dtype=bool)",
        "tf": "positions[:, None] >= positions[None, :]",
    }
    return instead("masks", lines, numpy=numpy, torch=torch, jax=f"j{numpy}", tf=tf)


def without_bias(projection: str, x: str) -> Edits:
    """Return edits that omit the bias of one of the attention projections."""
    kernel = f"self.{projection}.kernel"
    torch, jax = f"{x} @ self.{projection}.weight.T", f"{x} @ {kernel}[...]"
    own = f"{x} @ {kernel}"
    return instead("attention", f"self.{projection}({x})", numpy=own, torch=torch, jax=jax, tf=own)


def forbidden(score: str) -> Edits:
    """Return edits that set masked scores to the given value, so fully masked rows attend to all keys equally."""
    ports = instead("layers", LOWEST, torch=score, jax=score, tf=f"tf.constant({score}, wide.dtype)")
    numpy = [("functional", MASKED, f"np.where(mask, scores, {score})")]
    return {**together(ports, instead("layers", ZEROED, "weights")), "numpy": numpy}


ENTRIES: dict[str, Table] = {
    "attention": {
        f"{SELF}.scores": {
            "scores not scaled": instead("attention", "math.sqrt(d_k)", "1.0"),
            "scores divided by d_k": instead("attention", "math.sqrt(d_k)", "d_k"),
            "scores divided by sqrt(d_model)": instead(
                "attention", "math.sqrt(d_k)", "math.sqrt(query.shape[1] * d_k)"
            ),
            "scores divided by sqrt(d_v)": but(
                instead("attention", "d_k = query.shape[-1]", "d_k = value.shape[-1]"), unseen=("preset/torch",)
            ),
        },
        f"{SELF}.weights": {"softmax over the heads": softmax_over(1), "softmax over the queries": softmax_over(-2)},
        f"{SELF}.query": {
            "heads split as (d, h)": instead(
                "attention",
                SPLIT,
                numpy="x.reshape(batch, length, width // num_heads, num_heads).transpose(0, 3, 1, 2)",
                torch="x.view(batch, length, width // num_heads, num_heads).permute(0, 3, 1, 2)",
                jax="x.reshape(batch, length, width // num_heads, num_heads).transpose(0, 3, 1, 2)",
                tf="tf.transpose(tf.reshape(x, [batch, length, width // num_heads, num_heads]), [0, 3, 1, 2])",
            ),
            "heads split without a transpose": instead(
                "attention",
                SPLIT,
                numpy="x.reshape(batch, num_heads, length, width // num_heads)",
                torch="x.view(batch, num_heads, length, width // num_heads)",
                jax="x.reshape(batch, num_heads, length, width // num_heads)",
                tf="tf.reshape(x, [batch, num_heads, length, width // num_heads])",
            ),
        },
        f"{SELF}.output": {
            "heads merged without a transpose": changed(
                "attention",
                ("x.transpose(0, 2, 1, 3).reshape(", "x.reshape("),
                torch=("x.transpose(1, 2).reshape(", "x.reshape("),
                tf=("tf.transpose(x, [0, 2, 1, 3])", "x"),
            ),
            "W_o transposed": but(
                instead(
                    "attention",
                    "self.output_proj(merge_heads(context))",
                    numpy="(merge_heads(context) @ self.output_proj.kernel.T"
                    " + (0.0 if self.output_proj.bias is None else self.output_proj.bias))",
                    torch="(merge_heads(context) @ self.output_proj.weight + self.output_proj.bias)",
                    jax="(merge_heads(context) @ self.output_proj.kernel[...].T + self.output_proj.bias[...])",
                    tf="merge_heads(context) @ tf.transpose(self.output_proj.kernel) + self.output_proj.bias",
                ),
                case="preset/torch",  # d_v is 8 in this case, so the output kernel is square
            ),
        },
        (f"{SELF}.key", "preset/torch"): {"key bias missing": without_bias("key_proj", "memory")},
        (f"{SELF}.value", "preset/torch"): {"value bias missing": without_bias("value_proj", "memory")},
        f"{CROSS}.query": {
            "query and memory of cross-attention swapped": but(
                instead("decoder", "self.cross_attention(x, memory,", "self.cross_attention(memory, x,"),
                case="full/source_as_long_as_target",
            ),
            "W_q and W_k of cross-attention swapped": but(
                convert=swapped(f"{CROSS}.query_proj.kernel", f"{CROSS}.key_proj.kernel")
            ),
        },
    },
    "mask": {
        f"{CAUSAL}.weights": {
            "no causal mask": causal(
                "np.ones((length, length), bool)", "", "positions[:, None] >= 0 * positions[None, :]"
            ),
            "causal mask negated": instead("transformer", "self_mask = causal_mask(", "self_mask = ~causal_mask("),
            "causal mask uses the upper triangle": causal(
                "np.tri(length, dtype=bool).T", ".triu()", "positions[:, None] <= positions[None, :]"
            ),
            "a position does not attend to itself": causal(
                "np.tri(length, k=-1, dtype=bool)", ".tril(-1)", "positions[:, None] > positions[None, :]"
            ),
            "a position attends to the next one": causal(
                "np.tri(length, k=1, dtype=bool)", ".tril(1)", "positions[:, None] + 1 >= positions[None, :]"
            ),
            "decoder self-attention without padding mask": instead(
                "transformer", " & target_mask[:, None, None, :]", "[None, None]"
            ),
        },
        f"{SELF}.weights": {
            "encoder without padding mask": changed(
                "transformer",
                ("self.encoder(x, source_mask[", "self.encoder(x, (source_mask | True)["),
                tf=("self.encoder(x, mask=source_mask", "self.encoder(x, mask=source_mask | True"),
            ),
            "masked scores set to zero": forbidden("0.0"),
        },
        f"{CROSS}.weights": {
            "cross-attention without padding mask": instead(
                "transformer", "cross_mask = source_mask[:, None, None, :]", "cross_mask = None"
            )
        },
    },
}
CATALOG = {part: table(entries) for part, entries in ENTRIES.items()}

FULLY_MASKED = [
    Bug(name, at, edits, case=case, detail=detail, unseen=("full/padded",))
    for case, at in (
        ("attention/fully_masked_row", "weights"),
        ("attention/nothing_allowed", "weights"),
        ("full/source_all_padding", f"{SELF}.weights"),
    )
    for name, detail, edits in (
        ("fully masked rows attend to all keys", "", forbidden("-1e9")),
        ("softmax over only -inf", "values are NaN or infinite", in_ports_alone(forbidden('float("-inf")'))),
    )
]

# The bugs below affect only the fast path. One of them also requires attention dropout, and JAX's built-in attention
# function requires that d_k equals d_v. In all standard cases that compare activations on the fast path, d_k and d_v
# differ.
FUSED_CASE = replace(preset_case("torch"), name="preset/torch, fast", fast=True)
FUSED = "F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate)"
D_K = "    d_k = query.shape[-1]\n"
JAX_OWN = f"""    if tap is no_tap:
        from jax.nn import dot_product_attention

        query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
        return dot_product_attention(query, key, value, mask=mask).transpose(0, 2, 1, 3)
{D_K}"""
KERAS_OWN = f"""    if tap is no_tap:
        query, key, value = (tf.transpose(x, [0, 2, 1, 3]) for x in (query, key, value))
        return tf.transpose(keras.ops.dot_product_attention(query, key, value, mask=mask), [0, 2, 1, 3])
{D_K}"""


def fused(mask: str = "mask", rate: str = "rate") -> Edits:
    """Return edits that change the arguments in the call to PyTorch's fused attention kernel."""
    return changed("fast", torch=(FUSED, FUSED.replace("mask", mask).replace("rate", rate)))


FAST = table(
    {
        "output": {  # the bugs affect only runs without taps, because runs with taps don't use the kernel
            "fused kernel without the mask": fused("None"),
            "fused kernel without the scale": fused(rate="rate, scale=1.0"),
            "fused kernel causal in all self-attention": fused("None", "rate, is_causal=query.shape == key.shape"),
            "fused kernel with an additive mask": but(
                fused("None if mask is None else (~mask).to(query.dtype) * -1e9"), case="full/source_all_padding"
            ),
        },
        ("output", FUSED_CASE.name): {
            "fused kernel always applies dropout": changed("fast", torch=(" and dropout.training", "")),
            "JAX's built-in attention": changed("attention", jax=(D_K, JAX_OWN)),
            "Keras's built-in attention": changed("attention", tf=(D_K, KERAS_OWN)),
        },
    },
    path="fast",
)
