"""Known mistakes, as data: what each changes in a port, and where the comparison must find it.

A mistake is an edit of a port's source, planted in a copy of the package; or a config that the port assumes though
nobody asked for it; or weights that its converter mixes up on the way in and again on the way out, so that they come
back as they were given. ``CATALOGUE`` holds what went wrong in published ports, by the part of the model it sits in.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from numpy import ndarray

from reference_numpy.config import TransformerConfig
from transformer_parity import ports
from transformer_parity.compare import DIVERGES, FAILED, IMPRECISE
from transformer_parity.ports import PORTS, LoadedPort, PackagePort, Port, Result

ALL = ("torch", "jax", "tf")
Edit = tuple[str, str, str]  # module, what stands there once, what the mistake makes of it
Edits = Mapping[str, list[Edit]]  # by port
Weights = Mapping[str, ndarray]


@dataclass(frozen=True)
class Mistake:
    """One mistake, or an equivalent way to write the same; and what the comparison must say of it."""

    name: str
    at: str  # the first tap that must fail; empty where none may, and the announcement is all
    edits: Edits = field(default_factory=lambda: dict.fromkeys(ALL, []), repr=False)
    case: str = "full/padded"
    dtype: str = "float64"
    verdict: str = DIVERGES
    path: str = "taps"  # fast: the taps agree
    announced: str = ""  # what is said before any tap: taps of other names or order, weights that do not come back
    detail: str = ""  # what is said of the first tap
    unseen: tuple[str, ...] = ()  # dtypes, or other cases, in which the very same mistake raises no alarm
    config: Mapping[str, Any] = field(default_factory=dict)  # what the port assumes instead
    convert: Callable[[Weights], Weights] = field(default=dict, repr=False)  # its own inverse


def instead(module: str, old: str | Mapping[str, str], new: str | None = None, **by_port: str) -> Edits:
    """Return one edit per port: of the same line in all of them, or of each port's own."""
    texts = by_port if new is None else dict.fromkeys(old if isinstance(old, Mapping) else ALL, new)
    return {port: [(module, old if isinstance(old, str) else old[port], text)] for port, text in texts.items()}


def together(*changes: Edits) -> Edits:
    """Return several edits as one mistake."""
    return {port: [edit for change in changes for edit in change[port]] for port in changes[0]}


def swapped(first: str, second: str) -> Callable[[Weights], Weights]:
    """Return a converter that takes two weights of one shape for each other."""
    return lambda weights: {**weights, first: weights[second], second: weights[first]}


def transposed(name: str) -> Callable[[Weights], Weights]:
    """Return a converter that transposes a square matrix once too often."""
    return lambda weights: {**weights, name: weights[name].T}


ENCODER, DECODER = "encoder.layers.0", "decoder.layers.0"
SELF, CAUSAL, CROSS = f"{ENCODER}.self_attention", f"{DECODER}.self_attention", f"{DECODER}.cross_attention"
SOURCE, TARGET = "source_embedding.output", "target_embedding.output"

# Lines that more than one mistake touches, where the ports differ.
SPLIT = {
    "torch": "x.view(batch, length, num_heads, width // num_heads).transpose(1, 2)",
    "jax": "x.reshape(batch, length, num_heads, width // num_heads).transpose(0, 2, 1, 3)",
    "tf": "tf.transpose(tf.reshape(x, [batch, length, num_heads, width // num_heads]), [0, 2, 1, 3])",
}
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
BEFORE = {"torch": "torch.ones(length, length, dtype=torch.bool, device=device).tril()"}
BEFORE |= {"jax": "jnp.tri(length, dtype=bool)", "tf": "positions[:, None] >= positions[None, :]"}
ADDED = {"torch": "encoding.to(x.dtype)", "jax": "jnp.asarray(encoding, x.dtype)", "tf": "tf.cast(encoding, x.dtype)"}
BIASED = {"torch": "else self.weight, self.bias", "jax": "logits + self.bias", "tf": "logits + self.bias"}
GELU = {"torch": '"gelu": F.gelu', "jax": "partial(jax.nn.gelu, approximate=False)", "tf": '"gelu": gelu,'}
POSITIONED = "self.source_position(self.source_embedding(source_ids))"
ATTENDED = "self.self_attention_norm(x + self.dropout(attended))"
NORMED = ' x = tap("self_attention_norm.output"'
FUSED = "F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate)"
PROJECTED = 'tap("output", self.output_proj(merge_heads(context)))'
QUERY_TAP = 'q = tap("query", split_heads(self.query_proj(query), self.num_heads))  # [B, H, L, d_k]\n'
KEY_TAP = 'k = tap("key", split_heads(self.key_proj(memory), self.num_heads))  # [B, H, M, d_k]\n'


def softmax_over(axis: int) -> Edits:
    """Return edits that normalise the masked scores over another axis."""
    return {
        "torch": [("layers", ".min).softmax(-1", f".min).softmax({axis}")],
        "jax": [("layers", f"{LOWEST['jax']}))", f"{LOWEST['jax']}), axis={axis})")],
        "tf": [("layers", f"{LOWEST['tf']}))", f"{LOWEST['tf']}), axis={axis})")],
    }


def without_bias(projection: str, x: str) -> Edits:
    """Return edits that leave out the bias of one of the attention's projections."""
    kernel = f"self.{projection}.kernel"
    torch, jax, tf = f"{x} @ self.{projection}.weight.T", f"{x} @ {kernel}[...]", f"{x} @ {kernel}"
    return instead("attention", f"self.{projection}({x})", torch=torch, jax=jax, tf=tf)


def norm(torch: str, jax: str, tf: str) -> Edits:
    """Return edits that normalise ``x`` in another way; ``mean(y)`` keeps the axis."""
    lines = {
        "torch": ["mean = lambda y: y.mean(-1, keepdim=True)", f"return {torch} * self.weight + self.bias"],
        "jax": ["mean = lambda y: y.mean(-1, keepdims=True)", f"return {jax} * self.scale[...] + self.bias[...]"],
        "tf": ["mean = lambda y: tf.reduce_mean(y, -1, True)", f"return {tf} * self.gamma + self.beta"],
    }
    start = 'if self.kind == "standard":'
    return instead("layers", start, **{port: "\n            ".join([start, *new]) for port, new in lines.items()})


def forbidden(torch: str, jax: str, tf: str) -> Edits:
    """Return edits that give forbidden keys another score; where none is allowed they then share the weight."""
    return together(instead("layers", LOWEST, torch=torch, jax=jax, tf=tf), instead("layers", ZEROED, "weights"))


CATALOGUE = {
    "attention": [
        Mistake("scores not scaled", f"{SELF}.scores", instead("attention", "1.0 / math.sqrt(d_k)", "1.0")),
        Mistake("scores over d_k", f"{SELF}.scores", instead("attention", "math.sqrt(d_k)", "d_k")),
        Mistake(
            "scores over sqrt(d_model)",
            f"{SELF}.scores",
            instead("attention", "math.sqrt(d_k)", "math.sqrt(query.shape[1] * d_k)"),
        ),
        Mistake("softmax over the heads", f"{SELF}.weights", softmax_over(1)),
        Mistake("softmax over the queries", f"{SELF}.weights", softmax_over(-2)),
        Mistake(
            "heads split as (d, h)",
            f"{SELF}.query",
            instead(
                "attention",
                SPLIT,
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
                torch="x.view(batch, num_heads, length, width // num_heads)",
                jax="x.reshape(batch, num_heads, length, width // num_heads)",
                tf="tf.reshape(x, [batch, num_heads, length, width // num_heads])",
            ),
        ),
        Mistake(
            "heads merged without a transpose",
            f"{SELF}.output",
            {
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
                torch="merge_heads(context) @ self.output_proj.weight + self.output_proj.bias",
                jax="merge_heads(context) @ self.output_proj.kernel[...].T + self.output_proj.bias[...]",
                tf="merge_heads(context) @ tf.transpose(self.output_proj.kernel) + self.output_proj.bias",
            ),
            case="preset/torch",  # d_v 8: the matrix is square
        ),
        Mistake("key bias missing", f"{SELF}.key", without_bias("key_proj", "memory"), case="preset/torch"),
        Mistake("value bias missing", f"{SELF}.value", without_bias("value_proj", "memory"), case="preset/torch"),
        Mistake(
            "the memory asks",
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
            instead(
                "masks",
                BEFORE,
                torch="torch.ones(length, length, dtype=torch.bool, device=device)",
                jax="jnp.ones((length, length), bool)",
                tf="positions[:, None] >= 0 * positions[None, :]",
            ),
        ),
        Mistake(
            "causal mask negated",
            f"{CAUSAL}.weights",
            instead("transformer", "self_mask = causal_mask(", "self_mask = ~causal_mask("),
        ),
        Mistake(
            "causal mask of the upper triangle",
            f"{CAUSAL}.weights",
            instead(
                "masks",
                BEFORE,
                torch="torch.ones(length, length, dtype=torch.bool, device=device).triu()",
                jax="jnp.tri(length, dtype=bool).T",
                tf="positions[:, None] <= positions[None, :]",
            ),
        ),
        Mistake(
            "a position cannot see itself",
            f"{CAUSAL}.weights",
            instead(
                "masks",
                BEFORE,
                torch="torch.ones(length, length, dtype=torch.bool, device=device).tril(-1)",
                jax="jnp.tri(length, k=-1, dtype=bool)",
                tf="positions[:, None] > positions[None, :]",
            ),
        ),
        Mistake(
            "a position sees the next one",
            f"{CAUSAL}.weights",
            instead(
                "masks",
                BEFORE,
                torch="torch.ones(length, length, dtype=torch.bool, device=device).tril(1)",
                jax="jnp.tri(length, k=1, dtype=bool)",
                tf="positions[:, None] + 1 >= positions[None, :]",
            ),
        ),
        Mistake(
            "encoder without padding mask",
            f"{SELF}.weights",
            instead("transformer", "self.encoder(x, source_mask[:, None, None, :]", "self.encoder(x, None"),
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
            forbidden(torch="0.0", jax="0.0", tf="tf.constant(0.0, wide.dtype)"),
        ),
    ],
    "norm": [
        Mistake(
            "pre-norm",
            f"{SELF}.query",
            config={"norm_order": "pre"},
            announced=f"{SELF}_norm.output fired where {SELF}.query was due",
        ),
        Mistake("the Annotated Transformer's norm", f"{SELF}_norm.output", config={"layer_norm_kind": "annotated"}),
        Mistake("epsilon 1e-3", f"{SELF}_norm.output", config={"layer_norm_epsilon": 1e-3}),
        Mistake("epsilon 1e-5", f"{SELF}_norm.output", config={"layer_norm_epsilon": 1e-5}),
        Mistake("epsilon 1e-12", f"{SELF}_norm.output", config={"layer_norm_epsilon": 1e-12}),
        Mistake(
            "epsilon outside the root",
            f"{SELF}_norm.output",
            norm(
                torch="(x - mean(x)) / (mean((x - mean(x)) ** 2).sqrt() + self.eps)",
                jax="(x - mean(x)) / (mean((x - mean(x)) ** 2) ** 0.5 + self.epsilon)",
                tf="(x - mean(x)) / (mean((x - mean(x)) ** 2) ** 0.5 + self.epsilon)",
            ),
        ),
        Mistake(
            "unbiased variance",
            f"{SELF}_norm.output",
            norm(
                torch="(x - mean(x)) / (x.var(-1, keepdim=True) + self.eps).sqrt()",
                jax="(x - mean(x)) / (x.var(-1, ddof=1, keepdims=True) + self.epsilon) ** 0.5",
                tf="(x - mean(x)) / (mean((x - mean(x)) ** 2) * (24 / 23) + self.epsilon) ** 0.5",
            ),
        ),
        Mistake(
            "mean not subtracted",
            f"{SELF}_norm.output",
            norm(
                torch="x / (mean(x**2) + self.eps).sqrt()",
                jax="x / (mean(x**2) + self.epsilon) ** 0.5",
                tf="x / (mean(x**2) + self.epsilon) ** 0.5",
            ),
        ),
        Mistake(
            "a final norm nobody asked for",
            "encoder.output",
            instead("encoder", "if self.final_norm is not None:\n", "x = self.layers[-1].feed_forward_norm(x)\n        if 0:\n"),
        ),
    ],
    "residual": [
        Mistake("no residual", f"{SELF}_norm.output", instead("encoder", ATTENDED, ATTENDED.replace("x + ", ""))),
        Mistake(
            "norm before the sum",
            f"{SELF}_norm.output",
            instead("encoder", ATTENDED, "x + self.self_attention_norm(self.dropout(attended))"),
        ),
        Mistake(
            "feed-forward adds the layer's input",
            f"{ENCODER}.feed_forward_norm.output",
            together(
                instead("encoder", NORMED, NORMED.replace("x", "y")),
                instead("encoder", "transformed = self.feed_forward(x", "transformed = self.feed_forward(y"),
            ),
        ),
        Mistake(
            "cross-attention adds the layer's input",
            f"{CROSS}_norm.output",
            together(
                instead("decoder", NORMED, NORMED.replace("x", "y")),
                instead("decoder", "self.cross_attention(x, memory", "self.cross_attention(y, memory"),
            ),
        ),
    ],
    "embedding": [
        Mistake("embedding not scaled", SOURCE, config={"scale_embedding": False}),
        Mistake(
            "scaled after the positions are added",
            SOURCE,
            together(
                instead("embedding", " * self.multiplier", ""),
                instead("transformer", POSITIONED, f"{POSITIONED} * self.source_embedding.multiplier"),
            ),
        ),
        Mistake("no positions", SOURCE, instead("embedding", {k: f"x + {v}" for k, v in ADDED.items()}, "x")),
        Mistake("positions from 1", SOURCE, config={"position_offset": 1}),
        Mistake("all sines before the cosines", SOURCE, config={"position_layout": "split"}),
        Mistake(
            "sine and cosine swapped",
            SOURCE,
            {
                "torch": [("embedding", "(angles.sin(), angles.cos())", "(angles.cos(), angles.sin())")],
                "jax": [("embedding", "(np.sin(angles), np.cos(angles))", "(np.cos(angles), np.sin(angles))")],
                "tf": [("embedding", "(tf.sin(angles), tf.cos(angles))", "(tf.cos(angles), tf.sin(angles))")],
            },
        ),
        Mistake("tensor2tensor's wavelengths", SOURCE, config={"position_timescale": "m_minus_1"}),
        Mistake("exponent doubled", SOURCE, instead("embedding", " / steps)", " * 2 / steps)")),
        Mistake("exponent rounded down", SOURCE, instead("embedding", " / steps)", " // steps)")),
        Mistake(
            "output bias missing",
            "logits",
            instead("embedding", BIASED, torch="else self.weight", jax="logits", tf="logits"),
            case="full/untied",
        ),
    ],
    "feed-forward": [
        Mistake("GELU for ReLU", f"{ENCODER}.feed_forward.inner", config={"activation": "gelu"}),
        Mistake(
            "tanh-GELU for GELU",
            "feed_forward.inner",
            instead(
                "layers",
                GELU,
                torch='"gelu": partial(F.gelu, approximate="tanh")',
                jax="jax.nn.gelu",  # whose default it is
                tf='"gelu": gelu_tanh,',
            ),
            case="encoder_layer/pre",
        ),
    ],
    "stack": [
        Mistake(
            "one layer many times",
            "encoder.layers.1.self_attention.query",
            instead("encoder", "x = layer(", "x = self.layers[0]("),
        ),
        Mistake(
            "only the first layer",
            "encoder.output",
            instead("encoder", "enumerate(self.layers)", "enumerate([self.layers[0]])"),
            announced="missing encoder.layers.1.self_attention.query",
        ),
    ],
}

# TensorFloat32: what a GPU makes of float32 factors, and of no others.
TF32 = {
    "torch": """def tf32(x):
    import torch

    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + 4096) & -8192).view(torch.float32)


def """,
    "jax": """def tf32(x):
    from jax import lax

    return lax.reduce_precision(x, 8, 10) if x.dtype == "float32" else x


def """,
    "tf": """def tf32(x):
    return tf.bitcast((tf.bitcast(x, tf.int32) + 4096) & -8192, tf.float32) if x.dtype == tf.float32 else x


def """,
}
PRODUCT = {"torch": "query @ key.mT", "jax": "query @ key.mT", "tf": "tf.matmul(query, key, transpose_b=True)"}
FLOAT32_ANGLES: Edits = {
    "torch": [("embedding", '{"dtype": torch.float64', '{"dtype": torch.float32')],
    "jax": [("embedding", "(-np.arange(m) / steps)", "np.float32(-np.arange(m) / steps)")],
    "tf": [
        ("embedding", "/ steps), tf.float64)", "/ steps), tf.float32)"),
        ("embedding", "offset + length), tf.float64)", "offset + length), tf.float32)"),
    ],
}
FAST_VARIANCE = norm(
    torch="(x - mean(x)) / (mean(x**2) - mean(x) ** 2 + self.eps).sqrt()",
    jax="(x - mean(x)) / (mean(x**2) - mean(x) ** 2 + self.epsilon) ** 0.5",
    tf="(x - mean(x)) / (mean(x**2) - mean(x) ** 2 + self.epsilon) ** 0.5",
)

PRECISION = [
    # Right in float64, or where nobody looks closely; imprecise in float32.
    Mistake(
        "scores from TensorFloat32",
        f"{SELF}.scores",
        together(
            {
                "torch": [("attention", PRODUCT["torch"], "tf32(query) @ tf32(key).mT")],
                "jax": [("attention", PRODUCT["jax"], "tf32(query) @ tf32(key).mT")],
                "tf": [("attention", PRODUCT["tf"], "tf.matmul(tf32(query), tf32(key), transpose_b=True)")],
            },
            {port: [("attention", "def scaled_dot", f"{text}scaled_dot")] for port, text in TF32.items()},
        ),
        dtype="float32",
        verdict=IMPRECISE,
        unseen=("float64",),
    ),
    Mistake(
        "variance as E[x^2] - E[x]^2",
        "output",
        FAST_VARIANCE,
        case="layer_norm/standard",
        dtype="float32",
        verdict=IMPRECISE,
        unseen=("full/padded",),
    ),
    Mistake(
        "context from bfloat16",
        f"{SELF}.context",
        {"torch": [("attention", "weights @ value", "(weights.bfloat16() @ value.bfloat16()).to(value.dtype)")]},
        dtype="float32",
        verdict=IMPRECISE,
    ),
    Mistake(
        "mean summed in float16",
        f"{SELF}_norm.output",
        {"torch": norm("(x - mean(x.half()).to(x.dtype)) / (x.var(-1, False) + self.eps).sqrt()", "", "")["torch"]},
        dtype="float32",
        verdict=IMPRECISE,
    ),
    Mistake(
        "long positions from float32 angles",
        "output",
        FLOAT32_ANGLES,
        case="embedding/long_positions",
        dtype="float32",
        verdict=IMPRECISE,
    ),
    Mistake(
        "long positions from bfloat16 angles",
        "output",
        {"torch": [("embedding", '{"dtype": torch.float64', '{"dtype": torch.bfloat16')]},
        case="embedding/long_positions",
        dtype="bfloat16",
        verdict=IMPRECISE,
    ),
    # A float32 piece in a float64 model: wrong there, and invisible in float32.
    Mistake("positions from float32 angles", SOURCE, FLOAT32_ANGLES, unseen=("float32",)),
    Mistake(
        "softmax in float32",
        f"{SELF}.weights",
        instead("layers", WIDENED, torch="torch.float32", jax="jnp.float32", tf="tf.float32"),
        unseen=("float32",),
    ),
    Mistake(
        "scale rounded to float32",
        f"{SELF}.scores",
        {
            "torch": [("attention", "(1.0 / math.sqrt(d_k))", "query.new_tensor(d_k).float().rsqrt().item()")],
            "tf": [("attention", "(1.0 / math.sqrt(d_k))", "tf.cast(1.0 / math.sqrt(d_k), query.dtype)")],
        },
        unseen=("float32",),
    ),
    Mistake(
        "epsilon rounded to float32",
        f"{ENCODER}.feed_forward_norm.output",  # the first whose variance is as small as epsilon
        {
            "torch": [
                ("layers", "eps=config.layer_norm_epsilon", "eps=torch.tensor(config.layer_norm_epsilon).item()")
            ]
        },
        unseen=("float32",),
    ),
    Mistake(
        "TensorFlow's own GELU",
        "feed_forward.inner",
        {"tf": [("layers", '"gelu": gelu,', '"gelu": tf.nn.gelu,')]},
        case="encoder_layer/pre",
        unseen=("float32",),
    ),
]

FULLY_MASKED = [
    Mistake(
        name,
        at,
        forbidden(*scores),
        case=case,
        detail=detail,
        unseen=("full/padded",),
    )
    for case, at in (
        ("attention/fully_masked_row", "weights"),
        ("attention/nothing_allowed", "weights"),
        ("full/source_all_padding", f"{SELF}.weights"),
    )
    for name, detail, scores in (
        ("weights shared by forbidden keys", "", ("-1e9", "-1e9", "tf.constant(-1e9, wide.dtype)")),
        (
            "softmax of nothing but -inf",
            "values are NaN or infinite",
            ("-torch.inf", "-jnp.inf", "tf.constant(-math.inf, wide.dtype)"),
        ),
    )
]

FAST = [
    Mistake(name, "output", {port: [("attention", old, new)]}, case=case, path="fast")
    for port, name, case, old, new in (
        ("torch", "fused kernel without the mask", "full/padded", FUSED, FUSED.replace("mask", "None")),
        ("torch", "fused kernel without the scale", "full/padded", FUSED, FUSED.replace("rate", "rate, scale=1.0")),
        (
            "torch",
            "fused kernel causal by itself",
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
        ("torch", "fused kernel drops in inference", "preset/torch", " and dropout.training", ""),
        (
            "jax",
            "JAX's own attention",
            "preset/torch",
            "    d_k = query.shape[-1]\n",
            """    if tap is no_tap:
        from jax.nn import dot_product_attention

        query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
        return dot_product_attention(query, key, value, mask=mask).transpose(0, 2, 1, 3)
    d_k = query.shape[-1]
""",
        ),
        (
            "tf",
            "Keras' own attention",
            "preset/torch",
            "    d_k = query.shape[-1]\n",
            """    if tap is no_tap:
        query, key, value = (tf.transpose(x, [0, 2, 1, 3]) for x in (query, key, value))
        return tf.transpose(keras.ops.dot_product_attention(query, key, value, mask=mask), [0, 2, 1, 3])
    d_k = query.shape[-1]
""",
        ),
    )
]

STRUCTURE = [
    Mistake(
        "NaN in one place",
        f"{SELF}.output",
        {
            "torch": [("attention", PROJECTED, f"{PROJECTED}.index_fill(0, torch.tensor(0), torch.nan)")],
            "jax": [("attention", PROJECTED, PROJECTED.replace("(context))", "(context)).at[0, 0, 0].set(float('nan'))"))],
        },
        detail="values are NaN or infinite",
    ),
]
