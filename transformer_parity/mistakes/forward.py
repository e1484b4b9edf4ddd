"""What went wrong in published ports, by the part of the model it sits in."""

from __future__ import annotations

from transformer_parity.mistakes.mistake import ALL, Edits, Mistake, instead, swapped, together

ENCODER, DECODER = "encoder.layers.0", "decoder.layers.0"
SELF, CAUSAL, CROSS = f"{ENCODER}.self_attention", f"{DECODER}.self_attention", f"{DECODER}.cross_attention"
SOURCE, TARGET = "source_embedding.output", "target_embedding.output"

# Lines that more than one mistake touches, where the ports differ.
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
ADDED = {
    "numpy": "self.vectors(x.shape[1]).astype(x.dtype)",
    "torch": "encoding.to(x.dtype)",
    "jax": "jnp.asarray(encoding, x.dtype)",
    "tf": "tf.cast(encoding, x.dtype)",
}
BIASED = {
    "numpy": "linear(x, kernel, self.bias)",
    "torch": "else self.weight, self.bias",
    "jax": "logits + self.bias",
    "tf": "logits + self.bias",
}
GELU = {"torch": '"gelu": F.gelu', "jax": "partial(jax.nn.gelu, approximate=False)", "tf": '"gelu": gelu,'}
POSITIONED = "self.source_position(self.source_embedding(source_ids))"
ANSWERED = "self.target_position(self.target_embedding(target_ids))"
SUM = "self.self_attention_norm(x + "
ATTENDED = f"{SUM}self.dropout(attended))"
NORMED = ' x = tap("self_attention_norm.output"'


def in_ports_alone(edits: Edits) -> Edits:
    """Return edits without the reference's: an exception, NaN or mere rounding is not known by its numbers."""
    return {port: edits[port] for port in ALL if port in edits}


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


def norm(numpy: str, torch: str, tf: str) -> Edits:
    """Return edits that normalise ``x`` in another way, JAX's that of NumPy; ``mean(y)`` keeps the axis."""
    lines = {
        "numpy": ["mean = lambda y: y.mean(-1, keepdims=True)", f"return {numpy} * self.scale + self.bias"],
        "torch": ["mean = lambda y: y.mean(-1, keepdim=True)", f"return {torch} * self.weight + self.bias"],
        "jax": ["mean = lambda y: y.mean(-1, keepdims=True)", f"return {numpy} * self.scale[...] + self.bias[...]"],
        "tf": ["mean = lambda y: tf.reduce_mean(y, -1, True)", f"return {tf} * self.gamma + self.beta"],
    }
    start = 'if self.kind == "standard":'
    new = {port: "\n            ".join([start, *those]) for port, those in lines.items()}
    old = {**dict.fromkeys(ALL, start), "numpy": "normalise = "}
    return instead("layers", old, **{**new, "numpy": f"{new['numpy']}\n        normalise = "})


def forbidden(score: str) -> Edits:
    """Return edits that give forbidden keys another score; where none is allowed they then share the weight."""
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
            "a position cannot see itself",
            f"{CAUSAL}.weights",
            causal("np.tri(length, k=-1, dtype=bool)", ".tril(-1)", "positions[:, None] > positions[None, :]"),
        ),
        Mistake(
            "a position sees the next one",
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
                numpy="(x - mean(x)) / (mean((x - mean(x)) ** 2) ** 0.5 + self.epsilon)",
                torch="(x - mean(x)) / (mean((x - mean(x)) ** 2).sqrt() + self.eps)",
                tf="(x - mean(x)) / (mean((x - mean(x)) ** 2) ** 0.5 + self.epsilon)",
            ),
        ),
        Mistake(
            "unbiased variance",
            f"{SELF}_norm.output",
            norm(
                numpy="(x - mean(x)) / (x.var(-1, ddof=1, keepdims=True) + self.epsilon) ** 0.5",
                torch="(x - mean(x)) / (x.var(-1, keepdim=True) + self.eps).sqrt()",
                tf="(x - mean(x)) / (mean((x - mean(x)) ** 2) * x.shape[-1] / (x.shape[-1] - 1) + self.epsilon) ** 0.5",
            ),
        ),
        Mistake(
            "mean not subtracted",
            f"{SELF}_norm.output",
            norm(
                numpy="x / (mean(x**2) + self.epsilon) ** 0.5",
                torch="x / (mean(x**2) + self.eps).sqrt()",
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
        Mistake("no residual", f"{SELF}_norm.output", instead("encoder", SUM, "self.self_attention_norm(")),
        Mistake(
            "norm before the sum",
            f"{SELF}_norm.output",
            instead("encoder", SUM, "x + self.self_attention_norm("),
        ),
        Mistake(
            "feed-forward adds the layer's input",
            f"{ENCODER}.feed_forward_norm.output",
            together(
                instead("encoder", NORMED, NORMED.replace("x", "y")),
                instead("encoder", "self.feed_forward(x", "self.feed_forward(y"),
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
                instead("transformer", ANSWERED, f"{ANSWERED} * self.target_embedding.multiplier"),
            ),
        ),
        Mistake("no positions", SOURCE, instead("embedding", {k: f"x + {v}" for k, v in ADDED.items()}, "x")),
        Mistake("positions from 1", SOURCE, config={"position_offset": 1}),
        Mistake("all sines before the cosines", SOURCE, config={"position_layout": "split"}),
        Mistake(
            "sine and cosine swapped",
            SOURCE,
            {
                "numpy": [("embedding", "(np.sin(angles), np.cos(angles))", "(np.cos(angles), np.sin(angles))")],
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
            together(
                instead("embedding", "self.multiplier = ", "self.pad_id = config.pad_id\n        self.multiplier = "),
                instead(
                    "embedding",
                    " * self.multiplier",
                    numpy=" * (ids != self.pad_id)[..., None] * self.multiplier",
                    torch=" * (ids != self.pad_id)[..., None] * self.multiplier",
                    jax=" * (ids != self.pad_id)[..., None] * self.multiplier",
                    tf=" * tf.cast(ids != self.pad_id, self.dtype)[..., None] * self.multiplier",
                ),
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
            instead(
                "embedding", BIASED, numpy="linear(x, kernel)", torch="else self.weight", jax="logits", tf="logits"
            ),
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
            {
                "numpy": [("functional", '"gelu": gelu,', '"gelu": gelu_tanh,')],
                **instead(
                    "layers",
                    GELU,
                    torch='"gelu": partial(F.gelu, approximate="tanh")',
                    jax="jax.nn.gelu",  # whose default it is
                    tf='"gelu": gelu_tanh,',
                ),
            },
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


def everywhere(new: str) -> Edits:
    """Return edits of every residual connection of the reference; ``{norm}`` and ``{y}`` are its norm and sub-layer."""
    edits = []
    for stack, names in (
        ("encoder", ["self_attention", "feed_forward"]),
        ("decoder", ["self_attention", "cross_attention", "feed_forward"]),
    ):
        for name in names:
            norm, y = f"self.{name}_norm", "transformed" if name == "feed_forward" else "attended"
            edits.append((stack, f"{norm}(x + {y})", new.format(norm=norm, y=y)))
    return {"numpy": edits}


EVERYWHERE = [
    # What is planted in one place above: whole models have it in all. Only hypotheses.
    Mistake("norm before the sum, in every sub-layer", "", everywhere("x + {norm}({y})")),
    Mistake("no residual connections", "", everywhere("{norm}({y})")),
]
