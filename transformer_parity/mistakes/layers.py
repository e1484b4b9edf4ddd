"""Mistakes of norms, residual connections, embeddings, positions, feed-forward layers, and of the stack of layers."""

from __future__ import annotations

from transformer_parity.mistakes.mistake import (
    ALL,
    CROSS,
    ENCODER,
    SELF,
    SOURCE,
    TARGET,
    Edits,
    Mistake,
    instead,
    together,
)

# Lines of the ports that more than one mistake edits.
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


CATALOGUE = {
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
            "a final norm that the config does not have",
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
                    jax="jax.nn.gelu",  # tanh-GELU is its default
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


EVERYWHERE = [
    # The same mistakes as above, in every sub-layer. Only hypotheses.
    Mistake("norm before the sum, in every sub-layer", "", everywhere("x + {norm}({y})")),
    Mistake("no residual connections", "", everywhere("{norm}({y})")),
]
