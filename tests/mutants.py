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
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.config import TransformerConfig
from reference_numpy.search_plan import OnStep, SearchResult
from reference_numpy.training_config import Gradients, TrainingConfig
from transformer_parity import ports
from transformer_parity.cases import preset_case
from transformer_parity.compare import DIVERGES, FAILED, IMPRECISE
from transformer_parity.decoding import SearchOptions
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
    edits: Edits = field(default_factory=lambda: {port: [] for port in ALL}, repr=False)
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
ADDED = {"torch": "encoding.to(x.dtype)", "jax": "jnp.asarray(encoding, x.dtype)", "tf": "tf.cast(encoding, x.dtype)"}
BIASED = {"torch": "else self.weight, self.bias", "jax": "logits + self.bias", "tf": "logits + self.bias"}
GELU = {"torch": '"gelu": F.gelu', "jax": "partial(jax.nn.gelu, approximate=False)", "tf": '"gelu": gelu,'}
POSITIONED = "self.source_position(self.source_embedding(source_ids))"
ATTENDED = "self.self_attention_norm(x + self.dropout(attended))"
NORMED = ' x = tap("self_attention_norm.output"'


def softmax_over(axis: int) -> Edits:
    """Return edits that normalise the masked scores over another axis."""
    return {
        "torch": [("layers", ".min).softmax(-1", f".min).softmax({axis}")],
        "jax": [("layers", f"{LOWEST['jax']}))", f"{LOWEST['jax']}), axis={axis})")],
        "tf": [("layers", f"{LOWEST['tf']}))", f"{LOWEST['tf']}), axis={axis})")],
    }


def causal(torch: str, jax: str, tf: str) -> Edits:
    """Return edits that allow other pairs than the lower triangle."""
    lines = {"torch": ".tril()", "jax": "jnp.tri(length, dtype=bool)", "tf": "positions[:, None] >= positions[None, :]"}
    return instead("masks", lines, torch=torch, jax=jax, tf=tf)


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
                torch="(merge_heads(context) @ self.output_proj.weight + self.output_proj.bias)",
                jax="(merge_heads(context) @ self.output_proj.kernel[...].T + self.output_proj.bias[...])",
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
            causal("", "jnp.ones((length, length), bool)", "positions[:, None] >= 0 * positions[None, :]"),
        ),
        Mistake(
            "causal mask negated",
            f"{CAUSAL}.weights",
            instead("transformer", "self_mask = causal_mask(", "self_mask = ~causal_mask("),
        ),
        Mistake(
            "causal mask of the upper triangle",
            f"{CAUSAL}.weights",
            causal(".triu()", "jnp.tri(length, dtype=bool).T", "positions[:, None] <= positions[None, :]"),
        ),
        Mistake(
            "a position cannot see itself",
            f"{CAUSAL}.weights",
            causal(".tril(-1)", "jnp.tri(length, k=-1, dtype=bool)", "positions[:, None] > positions[None, :]"),
        ),
        Mistake(
            "a position sees the next one",
            f"{CAUSAL}.weights",
            causal(".tril(1)", "jnp.tri(length, k=1, dtype=bool)", "positions[:, None] + 1 >= positions[None, :]"),
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
                tf="(x - mean(x)) / (mean((x - mean(x)) ** 2) * x.shape[-1] / (x.shape[-1] - 1) + self.epsilon) ** 0.5",
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
            instead(
                "encoder",
                "if self.final_norm is not None:\n            x = self.final_norm(x)",
                "x = self.layers[-1].feed_forward_norm(x)",
            ),
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
            "no vector for padding",
            SOURCE,
            instead(
                "embedding",
                " * self.multiplier",
                torch=" * (ids != 0)[..., None] * self.multiplier",
                jax=" * (ids != 0)[..., None] * self.multiplier",
                tf=" * tf.cast(ids != 0, self.dtype)[..., None] * self.multiplier",
            ),
        ),
        Mistake(
            "target without positions",
            TARGET,
            instead(
                "transformer",
                "self.target_position(self.target_embedding(target_ids))",
                "self.target_embedding(target_ids)",
            ),
        ),
        Mistake(
            "output bias missing",
            "logits",
            instead("embedding", BIASED, torch="else self.weight", jax="logits", tf="logits"),
            case="full/untied",
        ),
    ],
    "feed-forward": [
        Mistake(
            "no activation",
            f"{ENCODER}.feed_forward.inner",
            instead("feed_forward", "self.activation(self.inner_proj(x))", "self.inner_proj(x)"),
        ),
        Mistake("GELU for ReLU", f"{ENCODER}.feed_forward.inner", config={"activation": "gelu"}),
        Mistake(
            "tanh-GELU for GELU",
            "inner",
            instead(
                "layers",
                GELU,
                torch='"gelu": partial(F.gelu, approximate="tanh")',
                jax="jax.nn.gelu",  # whose default it is
                tf='"gelu": gelu_tanh,',
            ),
            case="feed_forward/gelu",
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

PRODUCT = {"torch": "query @ key.mT", "jax": "query @ key.mT", "tf": "tf.matmul(query, key, transpose_b=True)"}
SCALE = " * (1.0 / math.sqrt(d_k))"
FREQUENCIES = "[:, None] * frequencies"
FLOAT32_FREQUENCIES = instead(
    "embedding",
    FREQUENCIES,
    torch=f"{FREQUENCIES}.float()",
    jax=f'{FREQUENCIES}.astype("float32")',
    tf="[:, None] * tf.cast(tf.cast(frequencies, tf.float32), tf.float64)",
)
FAST_VARIANCE = norm(
    torch="(x - mean(x)) / (mean(x**2) - mean(x) ** 2 + self.eps).sqrt()",
    jax="(x - mean(x)) / (mean(x**2) - mean(x) ** 2 + self.epsilon) ** 0.5",
    tf="(x - mean(x)) / (mean(x**2) - mean(x) ** 2 + self.epsilon) ** 0.5",
)
TF32 = {  # what a GPU makes of float32 factors, and of nothing wider
    "torch": """def tf32(x):
    import torch

    if x.dtype == torch.float64:
        return x
    return ((x.contiguous().view(torch.int32) + 4096) & -8192).view(torch.float32)
""",
    "jax": """def tf32(x):
    from jax import lax

    return x if x.dtype == "float64" else lax.reduce_precision(x, 8, 10)
""",
    "tf": """def tf32(x):
    return x if x.dtype == "float64" else tf.bitcast((tf.bitcast(x, tf.int32) + 4096) & -8192, tf.float32)
""",
}
START = "def scaled_dot_product_attention("

PRECISION = [
    # Right, and computed with too few bits.
    Mistake(
        "scores in TensorFloat32",
        f"{SELF}.scores",
        together(
            instead("attention", START, **{port: f"{text}\n\n{START}" for port, text in TF32.items()}),
            instead(
                "attention",
                PRODUCT,
                torch="tf32(query) @ tf32(key).mT",
                jax="tf32(query) @ tf32(key).mT",
                tf="tf.matmul(tf32(query), tf32(key), transpose_b=True)",
            ),
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
        "context in bfloat16",
        f"{SELF}.context",
        {"torch": [("attention", "weights @ value", "(weights.bfloat16() @ value.bfloat16()).to(value.dtype)")]},
        dtype="float32",
        verdict=IMPRECISE,
    ),
    Mistake(
        "mean in float16",
        f"{SELF}_norm.output",
        norm(
            torch="(x - mean(x.half()).to(x.dtype)) / (mean((x - mean(x)) ** 2) + self.eps).sqrt()",
            jax="(x - mean(x.astype('float16'))) / (mean((x - mean(x)) ** 2) + self.epsilon) ** 0.5",
            tf="(x - tf.cast(mean(tf.cast(x, 'float16')), x.dtype)) / (mean((x - mean(x)) ** 2) + self.epsilon) ** 0.5",
        ),
        dtype="float32",
        verdict=IMPRECISE,
    ),
    Mistake(
        "long positions from float32 frequencies",
        "output",
        FLOAT32_FREQUENCIES,
        case="embedding/long_positions",
        dtype="float32",
        verdict=IMPRECISE,
    ),
    Mistake(
        "long positions from bfloat16 frequencies",
        "output",
        {"torch": [("embedding", FREQUENCIES, f"{FREQUENCIES}.bfloat16()")]},
        case="embedding/long_positions",
        dtype="bfloat16",
        verdict=IMPRECISE,
    ),
    # A float32 piece in a float64 model: wrong there, and in float32 as good as any other.
    Mistake("positions from float32 frequencies", SOURCE, FLOAT32_FREQUENCIES, unseen=("float32",)),
    Mistake(
        "softmax in float32",
        f"{SELF}.weights",
        instead("layers", WIDENED, torch="torch.float32", jax="jnp.float32", tf="tf.float32"),
        unseen=("float32",),
    ),
    Mistake(
        "scale in float32",
        f"{SELF}.scores",
        instead(
            "attention",
            SCALE,
            torch=" * query.new_tensor(d_k).float().rsqrt().item()",
            tf=" * tf.cast(1.0 / math.sqrt(d_k), query.dtype)",  # TensorFlow reads a Python number as float32
        ),
        unseen=("float32",),
    ),
    Mistake(
        "epsilon in float32",
        f"{ENCODER}.feed_forward_norm.output",  # the first that sees a variance as small as epsilon
        config={"layer_norm_epsilon": float(np.float32(1e-6))},
        unseen=("float32",),
    ),
    Mistake(
        "TensorFlow's own GELU",
        "inner",
        {"tf": [("layers", GELU["tf"], '"gelu": tf.nn.gelu,')]},
        case="feed_forward/gelu",
        unseen=("float32",),
    ),
]

FULLY_MASKED = [
    Mistake(name, at, forbidden(*scores), case=case, detail=detail, unseen=("full/padded",))
    for case, at in (
        ("attention/fully_masked_row", "weights"),
        ("attention/nothing_allowed", "weights"),
        ("full/source_all_padding", f"{SELF}.weights"),
    )
    for name, detail, scores in (
        ("forbidden keys share the weight", "", ("-1e9", "-1e9", "tf.constant(-1e9, wide.dtype)")),
        (
            "softmax of nothing but -inf",
            "values are NaN or infinite",
            ("-torch.inf", "-jnp.inf", "tf.constant(-math.inf, wide.dtype)"),
        ),
    )
]

# On its fast path, no model of the deck has dropout on the attention, or the equal d_k and d_v that JAX's own asks for.
FUSED_CASE = replace(preset_case("torch"), name="preset/torch, fast", fast=True)
FUSED = "F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate)"
D_K = "    d_k = query.shape[-1]\n"
FAST = [
    # With taps on, nothing is wrong.
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

PROJECTED = "self.output_proj(merge_heads(context))"
LOGITS = {
    "torch": 'tap("logits", self.output_proj(x, self.target_embedding.table))',
    "jax": 'tap("logits", self.output_proj(x, self.target_embedding.table[...]))',
}
QUERY_TAP = 'q = tap("query", split_heads(self.query_proj(query), self.num_heads))  # [B, H, L, d_k]\n'
KEY_TAP = 'k = tap("key", k)  # [B, H, M, d_k]\n'


def one_value(value: str) -> Edits:
    """Return edits that spoil one number of the attention's output."""
    returned = f'return tap("output", {PROJECTED}.reshape(shape))'
    spoilt = f"x = {PROJECTED}\n        x[0, 0, 0] = {value}\n        return tap('output', x)"
    return {
        "torch": [("attention", returned, spoilt)],
        "jax": [("attention", PROJECTED, f"{PROJECTED}.at[0, 0, 0].set({value})")],
    }


# A padding mask of a shape seen before is not made again.
STALE = Mistake(
    "a mask kept from the last batch",
    f"{SELF}.weights",
    instead(
        "transformer",
        "            return ids, padding_mask(ids, config.pad_id)",
        torch="            kept = self.__dict__.setdefault('kept', {})\n"
        "            return ids, kept.setdefault(ids.shape, padding_mask(ids, config.pad_id))",
    ),
    case="full/source_all_padding",
)

STRUCTURE = [
    Mistake("NaN in one place", f"{SELF}.output", one_value("math.nan"), detail="1 of 864 values are NaN or infinite"),
    Mistake(
        "infinity in one place",
        f"{SELF}.output",
        {"torch": one_value("math.inf")["torch"]},
        dtype="bfloat16",
        detail="1 of 864 values are NaN or infinite",
    ),
    Mistake(
        "a tap missing",
        "",
        instead("attention", 'tap("context", weights @ value)', "weights @ value"),
        announced=f"missing {SELF}.context, encoder.layers.1.self_attention.context, {CAUSAL}.context and 3 more",
    ),
    Mistake(
        "a tap of another name",
        "",
        instead("attention", 'tap("weights", masked', 'tap("probabilities", masked'),
        announced=f"missing {SELF}.weights",
    ),
    Mistake(
        "a tap too many",
        "",
        instead("attention", 'tap("context", weights @ value)', 'tap("mean", tap("context", weights @ value))'),
        announced=f"unexpected {SELF}.mean",
    ),
    Mistake(
        "taps in another order",
        "",
        together(
            instead("attention", QUERY_TAP, "\n"),
            instead("attention", KEY_TAP, f"{KEY_TAP}            {QUERY_TAP}"),
        ),
        announced=f"{SELF}.key fired where {SELF}.query was due",
    ),
    Mistake(
        "a tap that fires twice",
        "output",
        instead("attention", 'tap("weights", masked', 'tap("scores", masked'),
        path="run",
        verdict=FAILED,
        detail="tap encoder.layers.0.self_attention.scores fired twice",
    ),
    Mistake(
        "float32 logits in float64",
        "logits",
        instead(
            "transformer",
            LOGITS,
            torch=LOGITS["torch"].replace("table)", "table).float()"),
            jax=LOGITS["jax"].replace("[...])", '[...]).astype("float32")'),
        ),
        detail="dtype must be float64: got float32",
    ),
    Mistake(
        "float32 logits in bfloat16",
        "logits",
        {"torch": [("transformer", LOGITS["torch"], LOGITS["torch"].replace("table)", "table).float()"))]},
        dtype="bfloat16",
        detail="dtype must be bfloat16: got float32",
    ),
    Mistake(
        "probabilities for logits",
        "output",
        instead(
            "transformer",
            LOGITS,
            torch=f"{LOGITS['torch']}.softmax(-1)",
            jax=f"jax.nn.softmax({LOGITS['jax']})",
        ),
    ),
    Mistake(
        "logits of the last position only",
        "logits",
        instead("transformer", "self.output_proj(x,", "self.output_proj(x[:, -1:],"),
        detail="shape must be [4, 7, 37]: got [4, 1, 37]",
    ),
    Mistake(
        "time before batch",
        "output",
        {"torch": [("transformer", LOGITS["torch"], f"{LOGITS['torch']}.transpose(0, 1)")]},
        detail="shape must be [4, 7, 37]: got [7, 4, 37]",
    ),
    Mistake(
        "axes of size one squeezed",
        "output",
        {
            "torch": [("transformer", LOGITS["torch"], f"{LOGITS['torch']}.squeeze()")],
        },
        case="full/one_sentence",
        detail="shape must be [1, 7, 37]: got [7, 37]",
        unseen=("full/padded",),
    ),
    Mistake(
        "an exception",
        "output",
        instead("encoder", "for i, layer in", 'raise NotImplementedError("later")\n        for i, layer in'),
        path="run",
        verdict=FAILED,
        detail="later",
    ),
    Mistake(
        "the memory asks, and nothing fits",
        "output",
        instead("decoder", "self.cross_attention(x, memory,", "self.cross_attention(memory, x,"),
        path="run",
        verdict=FAILED,
        detail="mask must broadcast to (4, 3, 9, 7): got (4, 1, 1, 9)",
    ),
    Mistake(
        "still in training mode",
        f"{SELF}.query",
        {
            "torch": [("transformer", "model.eval()", "model")],
            "jax": [("transformer", "        model.eval()\n", "")],
            "tf": [
                (
                    "transformer",
                    "self._encode(source_ids, source_mask, tap, training)\n        return self._decode",
                    "self._encode(source_ids, source_mask, tap, True)\n        return self._decode",
                )
            ],
        },
    ),
]

WEIGHTS = [
    Mistake(
        "a bias of another layer",
        f"{ENCODER}.feed_forward.inner",
        convert=swapped(f"{ENCODER}.feed_forward.inner_proj.bias", "encoder.layers.1.feed_forward.inner_proj.bias"),
    ),
    Mistake("a square matrix transposed", f"{SELF}.query", convert=transposed(f"{SELF}.query_proj.kernel")),
    Mistake(
        "source and target table swapped",
        SOURCE,
        convert=swapped("source_embedding.table", "target_embedding.table"),
        case="preset/torch",
    ),
    Mistake(
        "the decoder's final norm in the encoder",
        "encoder.output",
        convert=swapped("encoder.final_norm.scale", "decoder.final_norm.scale"),
        case="full/deeper_decoder",
    ),
    Mistake(
        "biases of norms left at zero",
        f"{SELF}_norm.output",
        {"tf": [("weights", "parameter.assign(", 'name.endswith("norm.bias") or parameter.assign(')]},
        announced=f"{SELF}_norm.bias does not come back as it was given",
    ),
    Mistake(
        "weights stored in float16",
        SOURCE,
        {
            port: [("weights", f"rounded(name, {array},", f'rounded(name, {array}.astype("float16"),')]
            for port, array in {"torch": "array", "jax": "weights[name]", "tf": "weights[name]"}.items()
        },
        announced="source_embedding.table does not come back as it was given",
    ),
    Mistake(
        "weights given back in float32",
        "",
        {"torch": [("weights", "tensor.numpy().copy()", "tensor.float().numpy()")]},
        announced="source_embedding.table does not come back as it was given",
    ),
    Mistake(
        "weights not given back",
        "",
        {
            port: [("weights", f"{all_of_them}}}", f'{all_of_them} if "inner" not in name}}')]
            for port, all_of_them in {
                "jax": "parameter_shapes(model.config)",
                "tf": "parameters(model).items()",
            }.items()
        },
        announced=f"missing {ENCODER}.feed_forward.inner_proj.kernel",
    ),
    Mistake(
        "matrices as they lie in the file",
        "output",
        {"torch": [("weights", "copy_((bits.T if name", "copy_((bits if name")]},
        path="run",
        verdict=FAILED,
        detail="RuntimeError: The size of tensor",
    ),
]

EDGES = [
    # Each takes a case of its own.
    Mistake(
        "every head has the mask of the first",
        "weights",
        instead(
            "layers", "    if mask is None:", "    mask = None if mask is None else mask[:, :1]\n    if mask is None:"
        ),
        case="attention/fully_masked_row",
        unseen=("full/padded",),
    ),
    Mistake(
        "positions end at max_length",
        "output",
        {
            "torch": [("embedding", "length, device=device)", "length, device=device).clamp(max=31)")],
            "jax": [
                ("embedding", "np.arange(offset, offset + length)", "np.arange(offset, offset + length).clip(max=31)")
            ],
        },
        case="embedding/long_positions",
        unseen=("full/padded",),
    ),
    Mistake(
        "encode without padding mask",
        f"{SELF}.weights",
        {
            "torch": [
                (
                    "transformer",
                    "return self._encode(source_ids, source_mask",
                    "return self._encode(source_ids, source_mask | True",
                )
            ]
        },
        case="encoder/encode",
        unseen=("full/padded",),
    ),
    Mistake(
        "decode without padding mask",
        f"{CROSS}.weights",
        instead("transformer", "memory_shape = (", "source_mask = source_mask | True\n        memory_shape = ("),
        case="decoder/decode",
        unseen=("full/padded",),
    ),
    Mistake(
        "given masks not used",
        f"{SELF}.weights",
        instead("transformer", 'to_mask("source_mask", mask,', 'to_mask("source_mask", mask | True,'),
        case="full/given_masks",
        unseen=("full/padded",),
    ),
    Mistake(
        "a start symbol taken for padding",
        f"{CAUSAL}.weights",
        instead("masks", " | is_first", ""),
        case="full/starts_with_padding",
        unseen=("full/padded",),
    ),
    Mistake(
        "decoder as deep as the encoder",
        "output",
        instead("decoder", "config.num_decoder_layers", "config.num_encoder_layers"),
        case="full/deeper_decoder",
        path="run",
        verdict=FAILED,
        unseen=("full/padded",),
    ),
    Mistake(
        "output tied to the source table",
        "logits",
        instead("transformer", "self.target_embedding.table", "self.source_embedding.table"),
        case="full/tied_target",
        detail="shape must be [4, 7, 41]: got [4, 7, 37]",
        unseen=("full/padded",),
    ),
    Mistake(
        "target looked up in the source table",
        TARGET,
        instead("transformer", "self.target_embedding(target_ids)", "self.source_embedding(target_ids % 37)"),
        case="full/untied",
        unseen=("full/padded",),
    ),
    Mistake(
        "offset of learned positions forgotten",
        "output",
        instead("embedding", "self.table[self.offset : self.offset + ", "self.table[: "),
        case="embedding/learned",
    ),
    Mistake(
        "softmax that overflows",
        "weights",
        {"torch": [("layers", "scores.softmax(-1, dtype)", "(scores.exp() / scores.exp().sum(-1, keepdim=True))")]},
        case="attention/sharp",
        dtype="float32",
        detail="values are NaN or infinite",
        unseen=("float64", "attention/no_mask"),
    ),
]

CONTROLS = [
    # Other ways to write the same: no alarm.
    Mistake(
        "the query is scaled",
        "",
        instead(
            "attention",
            {port: f"{product}{SCALE}" for port, product in PRODUCT.items()},
            torch="(query / math.sqrt(d_k)) @ key.mT",
            jax="(query / math.sqrt(d_k)) @ key.mT",
            tf="tf.matmul(query / math.sqrt(d_k), key, transpose_b=True)",
        ),
    ),
    Mistake("variance as E[x^2] - E[x]^2", "", FAST_VARIANCE),
    *(
        Mistake(
            f"forbidden scores are {score}",
            "",
            instead("layers", LOWEST, torch=f"-{score}", jax=f"-{score}", tf=f"tf.constant(-{score}, wide.dtype)"),
        )
        for score in ("1e4", "1e9", 'float("inf")')
    ),
    Mistake(
        "a mask to add",
        "",
        instead(
            "layers",
            {
                "torch": f"scores.masked_fill(~mask, {LOWEST['torch']})",
                "jax": f"jnp.where(mask, wide, {LOWEST['jax']})",
                "tf": f"tf.where(mask, wide, {LOWEST['tf']})",
            },
            torch="(scores + (~mask) * -1e9)",
            jax="wide + (~mask) * -1e9",
            tf="wide + tf.cast(~mask, wide.dtype) * -1e9",
        ),
    ),
]


@dataclass(frozen=True)
class MistakenModel:
    """A model that may have been given its weights in the wrong places, and gives them back from there."""

    loaded: LoadedPort
    convert: Callable[[Weights], Weights]

    def export(self) -> dict[str, ndarray]:
        return dict(self.convert(self.loaded.export()))

    def run(self, block: str, inputs: Mapping[str, ndarray], *, taps: bool) -> Result:
        return self.loaded.run(block, inputs, taps=taps)

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        return self.loaded.gradients(inputs)

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> ndarray:
        return self.loaded.decode_stepwise(source_ids, target_ids)

    def search(self, source_ids: ndarray, options: SearchOptions, on_step: OnStep | None = None) -> SearchResult:
        return self.loaded.search(source_ids, options, on_step)

    def trainer(self, settings: TrainingConfig, seed: int = 0) -> Any:
        return self.loaded.trainer(settings, seed)


@dataclass(frozen=True)
class MistakenPort:
    """A port with one mistake in it."""

    name: str
    port: PackagePort
    mistake: Mistake

    def load(
        self, config: TransformerConfig, weights: Weights, dtype: str, device: str, precision: str
    ) -> MistakenModel:
        config, weights = config.replace(**self.mistake.config), self.mistake.convert(weights)
        return MistakenModel(self.port.load(config, weights, dtype, device, precision), self.mistake.convert)

    def import_package(self) -> Any:
        return self.port.import_package()


@contextmanager
def planted(mistake: Mistake, backend: str, folder: Path) -> Iterator[Port]:
    """Yield a port whose package is a copy of one of ours, with the mistake in it."""
    original = PORTS[backend]
    package = f"mistaken_{backend}"
    files = Path(find_spec(original.package).origin).parent.glob("*.py")
    texts = {file.stem: file.read_text("utf-8") for file in files}
    for module, old, new in mistake.edits[backend]:
        if (found := texts[module].count(old)) != 1:
            raise ValueError(f"{original.package}.{module} must hold {old!r} once: found {found} times")
        texts[module] = texts[module].replace(old, new)
    (folder / package).mkdir()
    for module, text in texts.items():
        (folder / package / f"{module}.py").write_text(text.replace(original.package, package), "utf-8")
    compiled = dict(ports._JITTED)
    ports._JITTED.clear()  # what JAX compiled before knows nothing of the mistake
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield MistakenPort(backend, PackagePort(backend, package, original.needs, original.loaded), mistake)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        ports._JITTED.clear()
        ports._JITTED.update(compiled)
