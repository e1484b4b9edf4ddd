"""Bugs in norms, residual connections, embeddings, positional encodings, feed-forward networks, and layer stacks."""

from __future__ import annotations

from transformer_parity.transformer.bugs.bug import (
    CROSS,
    ENCODER,
    SELF,
    SOURCE,
    TARGET,
    Bug,
    Edits,
    Table,
    but,
    changed,
    instead,
    table,
    together,
)

# Each of these source lines is edited by multiple bugs.
ADDED = {
    "numpy": "self.vectors(x.shape[1]).astype(x.dtype)",
    "torch": "encoding.to(x)",
    "jax": "jnp.asarray(encoding, x.dtype)",
    "tf": "tf.cast(encoding, x.dtype)",
}
GELU = {"torch": '"gelu": F.gelu', "jax": "partial(jax.nn.gelu, approximate=False)", "tf": '"gelu": gelu,'}
POSITIONED = "self.source_position(self.source_embedding(source_ids))"
ANSWERED = "self.target_position(self.target_embedding(target_ids))"
SUM = "self.self_attention_norm(x + "
ATTENDED = f"{SUM}self.dropout(attended))"
NORMED = ' x = tap("self_attention_norm.output"'


def norm(usual: str, **others: str) -> Edits:
    """Return edits that replace the formula of layer norm.

    Args:
        usual: Expression for the normalized ``x``. The function ``mean(y)`` averages over the last axis and keeps it.
        **others: Expressions for individual backends that can't use ``usual``.
    """
    means = {
        **dict.fromkeys(("numpy", "jax"), "y.mean(-1, keepdims=True)"),
        "torch": "y.mean(-1, keepdim=True)",
        "tf": "tf.reduce_mean(y, -1, True)",
    }
    scaled = {
        "numpy": " * self.scale + self.bias",
        "torch": " * self.weight + self.bias",
        "jax": " * self.scale[...] + self.bias[...]",
        "tf": " * self.gamma + self.beta",
    }
    formulas = {**dict.fromkeys(means, usual), "torch": usual.replace("self.epsilon", "self.eps"), **others}
    start = 'if self.kind == "standard":'
    new = {
        port: f"{start}\n            mean = lambda y: {mean}\n            return {formulas[port]}{scaled[port]}"
        for port, mean in means.items()
    }
    return changed(
        "layers",
        numpy=("return layer_norm(", f"{new.pop('numpy')}\n        return layer_norm("),
        **{port: (start, text) for port, text in new.items()},
    )


def everywhere(new: str, old: str = "{norm}(x + {y})") -> Edits:
    """Return edits that replace the code of all residual connections in the reference.

    Args:
        new: Replacement code. This is a format string with optional fields: ``{norm}``, ``{y}`` (the sub-layer's
            output), and ``{name}``.
        old: Code to replace. This is a format string with the same optional fields as ``new``.
    """
    edits = []
    for stack, names in (
        ("encoder", ["self_attention", "feed_forward"]),
        ("decoder", ["self_attention", "cross_attention", "feed_forward"]),
    ):
        for name in names:
            y = "transformed" if name == "feed_forward" else "attended"
            words = {"norm": f"self.{name}_norm", "y": y, "name": name}
            edits.append((stack, old.format(**words), new.format(**words)))
    return {"numpy": edits}


def everywhere_in_pre_norm(new: str) -> Edits:
    """Return edits that replace ``x +`` in all pre-norm residual connections of the reference."""
    added = 'self.dropout({y}, rng, tap, "{name}'
    return everywhere(f"{new}{added}", f"x + {added}")


ENTRIES: dict[str, Table] = {
    "norm": {
        f"{SELF}.query": {
            "pre-norm": but(
                config={"norm_order": "pre"},
                announced=f"the names must be in the expected order: got {SELF}_norm.output instead of {SELF}.query",
            )
        },
        f"{SELF}_norm.output": {
            "the Annotated Transformer's norm": but(config={"layer_norm_kind": "annotated"}),
            "epsilon 1e-3": but(config={"layer_norm_epsilon": 1e-3}),
            "epsilon 1e-5": but(config={"layer_norm_epsilon": 1e-5}),
            "epsilon 1e-12": but(config={"layer_norm_epsilon": 1e-12}),
            "epsilon outside the root": norm("(x - mean(x)) / (mean((x - mean(x)) ** 2) ** 0.5 + self.epsilon)"),
            "unbiased variance": norm(
                "(x - mean(x)) / (x.var(-1, ddof=1, keepdims=True) + self.epsilon) ** 0.5",
                torch="(x - mean(x)) / (x.var(-1, keepdim=True) + self.eps).sqrt()",
                tf="(x - mean(x)) / (mean((x - mean(x)) ** 2) * x.shape[-1] / (x.shape[-1] - 1) + self.epsilon) ** 0.5",
            ),
            "mean not subtracted": norm("x / (mean(x**2) + self.epsilon) ** 0.5"),
        },
        "encoder.output": {
            "final norm that is not in the config": instead(
                "encoder",
                "if self.final_norm is not None:\n            x = self.final_norm(x)",
                "x = self.layers[-1].feed_forward_norm(x)",
            )
        },
    },
    "residual": {
        f"{SELF}_norm.output": {
            "no residual connection around the encoder's self-attention": instead(
                "encoder", SUM, "self.self_attention_norm("
            ),
            "norm before the sum": instead("encoder", SUM, "x + self.self_attention_norm("),
        },
        f"{ENCODER}.feed_forward_norm.output": {
            "feed-forward residual adds the layer's input": together(
                instead("encoder", NORMED, NORMED.replace("x", "y")),
                instead("encoder", "self.feed_forward(x", "self.feed_forward(y"),
            )
        },
        f"{CROSS}_norm.output": {
            "cross-attention residual adds the layer's input": together(
                instead("decoder", NORMED, NORMED.replace("x", "y")),
                instead("decoder", "self.cross_attention(x, memory", "self.cross_attention(y, memory"),
            )
        },
    },
    "embedding": {
        SOURCE: {
            "embedding not scaled": but(config={"scale_embedding": False}),
            "embedding scaled after adding positions": together(
                instead("embedding", " * self.multiplier", ""),
                instead("transformer", POSITIONED, f"{POSITIONED} * self.source_embedding.multiplier"),
                instead("transformer", ANSWERED, f"{ANSWERED} * self.target_embedding.multiplier"),
            ),
            "no positions": instead("embedding", {k: f"x + {v}" for k, v in ADDED.items()}, "x"),
            "positions start at 1": but(config={"position_offset": 1}),
            "all sines before the cosines": but(config={"position_layout": "split"}),
            "sine and cosine swapped": changed(
                "embedding",
                ("(np.sin(angles), np.cos(angles))", "(np.cos(angles), np.sin(angles))"),
                torch=("(angles.sin(), angles.cos())", "(angles.cos(), angles.sin())"),
                tf=("(tf.sin(angles), tf.cos(angles))", "(tf.cos(angles), tf.sin(angles))"),
            ),
            "tensor2tensor's wavelengths": but(config={"position_timescale": "m_minus_1"}),
            "exponent doubled": instead("embedding", " / steps)", " * 2 / steps)"),
            "exponent rounded down": instead("embedding", " / steps)", " // steps)"),
            "padding embeds to zero": together(
                instead("embedding", "self.multiplier = ", "self.pad_id = config.pad_id\n        self.multiplier = "),
                changed(
                    "embedding",
                    (" * self.multiplier", " * (ids != self.pad_id)[..., None] * self.multiplier"),
                    tf=(
                        " * self.multiplier",
                        " * tf.cast(ids != self.pad_id, self.dtype)[..., None] * self.multiplier",
                    ),
                ),
            ),
        },
        TARGET: {"target without positions": instead("transformer", ANSWERED, "self.target_embedding(target_ids)")},
        (SOURCE, "preset/bart"): {
            "no norm on the embeddings": together(
                *(
                    instead(
                        "transformer",
                        f"({ids}))  # [B, {length}, d_model]\n        if self.{side}_embedding_norm is not None:",
                        f"({ids}))\n        if False:",
                    )
                    for side, ids, length in (("source", "source_ids", "S"), ("target", "target_ids", "T"))
                )
            ),
            "positions added after the embedding norm": instead(
                "transformer",
                "self.source_position(self.source_embedding(source_ids))  # [B, S, d_model]\n"
                "        if self.source_embedding_norm is not None:\n"
                "            x = self.source_embedding_norm(x)",
                "self.source_position(self.source_embedding_norm(self.source_embedding(source_ids)))",
            ),
        },
        (TARGET, "preset/bart"): {
            "one norm shared by both embeddings": instead(
                "transformer",
                "d_model]\n        if self.target_embedding_norm is not None:\n"
                "            x = self.target_embedding_norm(x)\n        x = self.dropout",
                "d_model]\n        x = self.source_embedding_norm(x)\n        x = self.dropout",
            )
        },
        ("logits", "full/untied"): {
            "output bias missing": {
                **changed(
                    "embedding",
                    ("logits + self.bias", "logits"),
                    numpy=("linear(x, self._matrix, self.bias)", "linear(x, self._matrix)"),
                ),
                **changed(
                    "transformer",
                    torch=("self.output_proj(x))\n\n", "x @ self.output_proj.weight.T)\n\n"),
                    jax=("self.output_proj(x))\n\n", "x @ self.output_proj.kernel[...])\n\n"),
                ),
            }
        },
    },
    "feed-forward": {
        f"{ENCODER}.feed_forward.inner": {
            "no activation": instead(
                "feed_forward", "ACTIVATIONS[self.activation](self.inner_proj(x))", "self.inner_proj(x)"
            ),
            "GELU instead of ReLU": but(config={"activation": "gelu"}),
        },
        ("inner", "feed_forward/gelu"): {
            "tanh-GELU instead of GELU": {
                "numpy": [("functional", '"gelu": gelu,', '"gelu": gelu_tanh,')],
                **instead(
                    "layers",
                    GELU,
                    torch='"gelu": partial(F.gelu, approximate="tanh")',
                    jax="jax.nn.gelu",  # jax.nn.gelu computes the tanh approximation by default
                    tf='"gelu": gelu_tanh,',
                ),
            }
        },
    },
    "stack": {
        "encoder.layers.1.self_attention.query": {
            "first layer used for all layers": instead("encoder", "x = layer(", "x = self.layers[0](")
        },
        "encoder.output": {
            "only the first layer runs": but(
                instead("encoder", "enumerate(self.layers)", "enumerate([self.layers[0]])"),
                announced="missing encoder.layers.1.self_attention.query",
            )
        },
    },
}
CATALOG = {part: table(entries) for part, entries in ENTRIES.items()}


EVERYWHERE = [
    # These variants of the bugs above affect all sub-layers. They serve only as candidates for the diagnosis.
    Bug("norm before the sum, in every sub-layer", "", everywhere("x + {norm}({y})")),
    Bug("no residual connections", "", everywhere("{norm}({y})")),
    Bug("no residual connections in pre-norm", "", everywhere_in_pre_norm(""), case="full/deeper_decoder"),
]
