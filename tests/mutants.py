"""Known mistakes, as data: what each changes in a port, and where the comparison must find it.

A mistake is an edit of a port's source, planted in a copy of the package; or a config that the port assumes and
nobody asked for; or weights that its converter mixes up, both ways, so that they come back as they were given.
Mistakes of the forward pass that are known from published ports stand first, by kind.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy import ndarray

from transformer_parity import ports
from transformer_parity.compare import AGREES, DIVERGES, FAILED, IMPRECISE
from transformer_parity.ports import PORTS, LoadedPort, PackagePort, Result

Edit = tuple[str, str, str]  # module, what stands there, what the mistake makes of it
Weights = Mapping[str, ndarray]

ALL = "torch jax tf"
ENCODER = "encoder.layers.0"
DECODER = "decoder.layers.0"
SELF = f"{ENCODER}.self_attention"
CAUSAL = f"{DECODER}.self_attention"
CROSS = f"{DECODER}.cross_attention"


def same(weights: Weights) -> Weights:
    """Return the weights as they are."""
    return weights


def swapped(first: str, second: str) -> Callable[[Weights], Weights]:
    """Return a converter that takes two weights of one shape for each other."""
    return lambda weights: {**weights, first: weights[second], second: weights[first]}


def transposed(name: str) -> Callable[[Weights], Weights]:
    """Return a converter that transposes a square matrix once too often."""
    return lambda weights: {**weights, name: weights[name].T}


@dataclass(frozen=True)
class Mistake:
    """One mistake, and what the comparison must say of it."""

    name: str
    at: str  # the first tap that must fail; empty: none, the announcement is all
    edits: Mapping[str, Sequence[Edit]] = field(repr=False)  # by the ports it is planted in
    case: str = "full/padded"
    dtype: str = "float64"
    verdict: str = DIVERGES
    path: str = "taps"
    announced: str = ""  # what is said before any tap: names or order of taps, or weights that do not come back
    hidden_in: tuple[str, ...] = ()  # the dtypes in which the same mistake must raise no alarm
    config: Mapping[str, Any] = field(default_factory=dict)  # what the port assumes instead
    convert: Callable[[Weights], Weights] = field(default=same, repr=False)  # its own inverse


# The lines of the ports that many mistakes touch.
ATTENDED = "self.self_attention_norm(x + self.dropout(attended))"
NORM = {"torch": "super().forward(x)", "jax": "super().__call__(x)", "tf": "super().call(x)"}
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
FUSED = "F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate)"
MERGED = "self.output_proj(merge_heads(context))"
QUERY_TAP = 'q = tap("query", split_heads(self.query_proj(query), self.num_heads))  # [B, H, L, d_k]\n'
KEY_TAP = 'k = tap("key", split_heads(self.key_proj(memory), self.num_heads))  # [B, H, M, d_k]\n'


def norm(torch: str, jax: str, tf: str) -> dict[str, list[Edit]]:
    """Return edits that compute the standard norm of ``x`` in another way, before scale and bias."""
    return {
        "torch": [("layers", NORM["torch"], f"{torch} * self.weight + self.bias")],
        "jax": [("layers", NORM["jax"], f"{jax} * self.scale[...] + self.bias[...]")],
        "tf": [("layers", NORM["tf"], f"{tf} * self.gamma + self.beta")],
    }


def fill(torch: str, jax: str, tf: str, *, zeroed: bool) -> dict[str, list[Edit]]:
    """Return edits that put another score where the mask forbids, and let the weights there be or not."""
    edits = {}
    for port, value in {"torch": torch, "jax": jax, "tf": tf}.items():
        edits[port] = [("layers", LOWEST[port], value)]
        if not zeroed:
            edits[port].append(("layers", ZEROED[port], "weights"))
    return edits


ATTENTION = [
    Mistake("scores not scaled", f"{SELF}.scores", {ALL: [("attention", "1.0 / math.sqrt(d_k)", "1.0")]}),
    Mistake("scores divided by d_k", f"{SELF}.scores", {ALL: [("attention", "math.sqrt(d_k)", "d_k")]}),
    Mistake(
        "scores divided by sqrt(d_model)",
        f"{SELF}.scores",
        {ALL: [("attention", "math.sqrt(d_k)", "math.sqrt(query.shape[1] * d_k)")]},
    ),
    Mistake(
        "softmax over the heads",
        f"{SELF}.weights",
        {
            "torch": [("layers", ".min).softmax(-1", ".min).softmax(1")],
            "jax": [("layers", "(wide.dtype).min))", "(wide.dtype).min), axis=1)")],
            "tf": [("layers", "wide.dtype)))\n", "wide.dtype)), axis=1)\n")],
        },
    ),
    Mistake(
        "softmax over the queries",
        f"{SELF}.weights",
        {
            "torch": [("layers", ".min).softmax(-1", ".min).softmax(-2")],
            "jax": [("layers", "(wide.dtype).min))", "(wide.dtype).min), axis=-2)")],
            "tf": [("layers", "wide.dtype)))\n", "wide.dtype)), axis=-2)\n")],
        },
    ),
    Mistake(
        "heads split as (d, h)",
        f"{SELF}.query",
        {
            "torch": [
                (
                    "attention",
                    "num_heads, width // num_heads).transpose(1, 2)",
                    "width // num_heads, num_heads).permute(0, 3, 1, 2)",
                )
            ],
            "jax": [
                (
                    "attention",
                    "num_heads, width // num_heads).transpose(0, 2, 1, 3)",
                    "width // num_heads, num_heads).transpose(0, 3, 1, 2)",
                )
            ],
            "tf": [
                (
                    "attention",
                    "num_heads, width // num_heads]), [0, 2, 1, 3]",
                    "width // num_heads, num_heads]), [0, 3, 1, 2]",
                )
            ],
        },
    ),
    Mistake(
        "heads split without a transpose",
        f"{SELF}.query",
        {
            "torch": [
                (
                    "attention",
                    "length, num_heads, width // num_heads).transpose(1, 2)",
                    "num_heads, length, width // num_heads)",
                )
            ],
            "jax": [
                (
                    "attention",
                    "length, num_heads, width // num_heads).transpose(0, 2, 1, 3)",
                    "num_heads, length, width // num_heads)",
                )
            ],
            "tf": [
                (
                    "attention",
                    "length, num_heads, width // num_heads]), [0, 2, 1, 3]",
                    "num_heads, length, width // num_heads]), [0, 1, 2, 3]",
                )
            ],
        },
    ),
    Mistake(
        "heads merged without a transpose",
        f"{SELF}.output",
        {
            "torch": [("attention", "x.transpose(1, 2).reshape(", "x.reshape(")],
            "jax": [("attention", "x.transpose(0, 2, 1, 3).reshape(", "x.reshape(")],
            "tf": [("attention", "tf.reshape(tf.transpose(x, [0, 2, 1, 3]),", "tf.reshape(x,")],
        },
    ),
    Mistake(
        "output matrix transposed",
        f"{SELF}.output",
        {
            "torch": [("attention", MERGED, "merge_heads(context) @ self.output_proj.weight + self.output_proj.bias")],
            "jax": [
                (
                    "attention",
                    MERGED,
                    "merge_heads(context) @ self.output_proj.kernel[...].T + self.output_proj.bias[...]",
                )
            ],
            "tf": [
                (
                    "attention",
                    MERGED,
                    "merge_heads(context) @ tf.transpose(self.output_proj.kernel) + self.output_proj.bias",
                )
            ],
        },
        case="preset/torch",  # d_v 8: the matrix is square
    ),
    Mistake(
        "query bias missing",
        f"{SELF}.query",
        {
            "torch": [("attention", "self.query_proj(query)", "query @ self.query_proj.weight.T")],
            "jax": [("attention", "self.query_proj(query)", "query @ self.query_proj.kernel[...]")],
            "tf": [("attention", "self.query_proj(query)", "query @ self.query_proj.kernel")],
        },
        case="preset/torch",
    ),
    Mistake(
        "key bias missing",
        f"{SELF}.key",
        {
            "torch": [("attention", "self.key_proj(memory)", "memory @ self.key_proj.weight.T")],
            "jax": [("attention", "self.key_proj(memory)", "memory @ self.key_proj.kernel[...]")],
            "tf": [("attention", "self.key_proj(memory)", "memory @ self.key_proj.kernel")],
        },
        case="preset/torch",
    ),
    Mistake(
        "value bias missing",
        f"{SELF}.value",
        {
            "torch": [("attention", "self.value_proj(memory)", "memory @ self.value_proj.weight.T")],
            "jax": [("attention", "self.value_proj(memory)", "memory @ self.value_proj.kernel[...]")],
            "tf": [("attention", "self.value_proj(memory)", "memory @ self.value_proj.kernel")],
        },
        case="preset/torch",
    ),
    Mistake(
        "cross-attention takes memory for query",
        f"{CROSS}.query",
        {ALL: [("decoder", "self.cross_attention(x, memory,", "self.cross_attention(memory, x,")]},
        case="full/source_as_long_as_target",
    ),
    Mistake(
        "query and key matrix of cross-attention swapped",
        f"{CROSS}.query",
        {ALL: []},
        convert=swapped(f"{CROSS}.query_proj.kernel", f"{CROSS}.key_proj.kernel"),
    ),
]

MASK = [
    Mistake(
        "no causal mask",
        f"{CAUSAL}.weights",
        {
            "torch": [("masks", ".tril()", "")],
            "jax": [("masks", "jnp.tri(length, dtype=bool)", "jnp.ones((length, length), bool)")],
            "tf": [("masks", ">= positions[None, :]", ">= 0 * positions[None, :]")],
        },
    ),
    Mistake(
        "causal mask negated", f"{CAUSAL}.weights", {ALL: [("transformer", "self_mask = causal", "self_mask = ~causal")]}
    ),
    Mistake(
        "causal mask of the upper triangle",
        f"{CAUSAL}.weights",
        {
            "torch": [("masks", ".tril()", ".triu()")],
            "jax": [("masks", "jnp.tri(length, dtype=bool)", "jnp.tri(length, dtype=bool).T")],
            "tf": [("masks", ">= positions", "<= positions")],
        },
    ),
    Mistake(
        "a position cannot see itself",
        f"{CAUSAL}.weights",
        {
            "torch": [("masks", ".tril()", ".tril(-1)")],
            "jax": [("masks", "jnp.tri(length, dtype", "jnp.tri(length, k=-1, dtype")],
            "tf": [("masks", ">= positions", "> positions")],
        },
    ),
    Mistake(
        "a position sees the next",
        f"{CAUSAL}.weights",
        {
            "torch": [("masks", ".tril()", ".tril(1)")],
            "jax": [("masks", "jnp.tri(length, dtype", "jnp.tri(length, k=1, dtype")],
            "tf": [("masks", ">= positions", "+ 1 >= positions")],
        },
    ),
    Mistake(
        "no source padding mask in the encoder",
        f"{SELF}.weights",
        {ALL: [("transformer", "self.encoder(x, source_mask[:, None, None, :]", "self.encoder(x, None")]},
    ),
    Mistake(
        "no source padding mask in cross-attention",
        f"{CROSS}.weights",
        {ALL: [("transformer", "cross_mask = source_mask[:, None, None, :]", "cross_mask = None")]},
    ),
    Mistake(
        "no target padding mask",
        f"{CAUSAL}.weights",
        {ALL: [("transformer", " & target_mask[:, None, None, :]", "[None, None]")]},
    ),
    Mistake(
        "forbidden scores set to zero",
        f"{SELF}.weights",
        fill("0.0", "0.0", "tf.constant(0.0, wide.dtype)", zeroed=False),
    ),
]

NORMS = [
    Mistake(
        "pre-norm for post-norm",
        f"{SELF}.query",
        {ALL: []},
        config={"norm_order": "pre"},
        announced=f"{SELF}_norm.output fired where {SELF}.query was due",
    ),
    Mistake(
        "RMS norm",
        f"{SELF}_norm.output",
        norm(
            "x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps)",
            "x / jnp.sqrt((x**2).mean(-1, keepdims=True) + self.epsilon)",
            "x / tf.sqrt(tf.reduce_mean(x**2, -1, keepdims=True) + self.epsilon)",
        ),
    ),
    Mistake(
        "unbiased variance",
        f"{SELF}_norm.output",
        norm(
            "(x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, correction=1, keepdim=True) + self.eps)",
            "(x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, ddof=1, keepdims=True) + self.epsilon)",
            "(x - tf.reduce_mean(x, -1, keepdims=True)) / tf.sqrt("
            "tf.math.reduce_variance(x, -1, keepdims=True) * x.shape[-1] / (x.shape[-1] - 1) + self.epsilon)",
        ),
    ),
    Mistake(
        "epsilon outside the root",
        f"{SELF}_norm.output",
        norm(
            "(x - x.mean(-1, keepdim=True)) / (x.std(-1, correction=0, keepdim=True) + self.eps)",
            "(x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + self.epsilon)",
            "(x - tf.reduce_mean(x, -1, keepdims=True)) / (tf.math.reduce_std(x, -1, keepdims=True) + self.epsilon)",
        ),
    ),
    Mistake(
        "the Annotated Transformer's norm", f"{SELF}_norm.output", {ALL: []}, config={"layer_norm_kind": "annotated"}
    ),
    Mistake("epsilon 1e-3", f"{SELF}_norm.output", {ALL: []}, config={"layer_norm_epsilon": 1e-3}),
    Mistake("epsilon 1e-5", f"{SELF}_norm.output", {"torch": []}, config={"layer_norm_epsilon": 1e-5}),
    Mistake("epsilon 1e-12", f"{SELF}_norm.output", {"torch tf": []}, config={"layer_norm_epsilon": 1e-12}),
    Mistake(
        "a final norm nobody asked for",
        "encoder.output",
        {
            "torch": [("encoder", 'tap("output", x)\n\n\n', 'tap("output", x)\n\n\n')],
        },
    ),
]
