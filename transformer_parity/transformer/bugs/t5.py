"""Bugs in the parts of T5: relative position biases, RMSNorm, gated feed-forward networks, and omitted scalings."""

from __future__ import annotations

from transformer_parity.transformer.bugs.bug import (
    CROSS,
    ENCODER,
    SELF,
    SOURCE,
    Bug,
    Edits,
    Table,
    but,
    changed,
    instead,
    swapped,
    table,
    together,
)

BIAS, LATER = "relative_bias.output", "encoder.layers.1.self_attention.scores"
ACTIVATED = "ACTIVATIONS[self.activation](self.gate_proj(x))"
HALVED = "    if bidirectional:\n        num_buckets //= 2\n"
FINAL = "if config.final_norm else None\n"
ASKS = {
    "numpy": 'attended = self.cross_attention(normed, memory, cross_mask, within(tap, "cross_attention"), rng',
    **dict.fromkeys(
        ("torch", "jax"), 'self.cross_attention(normed, memory, cross_mask, within(tap, "cross_attention")'
    ),
    "tf": 'self.cross_attention(normed, memory, cross_mask, tap=within(tap, "cross_attention")',
}
ARANGE = {"numpy": "np.arange({})", "torch": "torch.arange({})", "jax": "jnp.arange({})", "tf": "tf.range({})"}


def _in_cross_attention() -> Edits:
    """Return edits that add the decoder's relative position bias to the scores of cross-attention."""
    found = {}
    for port, asks in ASKS.items():
        keys, queries = (ARANGE[port].format(f"{x}.shape[1]") for x in ("memory", "normed"))
        bias = f"bias=self.cross_bias({keys} - {queries}[:, None])"
        given = f"{FINAL}        for layer in self.layers:\n            layer.cross_bias = self.relative_bias\n"
        found[port] = [("decoder", FINAL, given), ("decoder", asks, f"{asks}, {bias}")]
    return found


def _with_mean() -> Edits:
    """Return edits that subtract the mean in RMSNorm, as layer norm does."""
    mean = {
        "torch": "x.mean(-1, keepdim=True)",
        "jax": "x.mean(-1, keepdims=True)",
        "tf": "tf.reduce_mean(x, -1, True)",
    }
    base = {"torch": "nn.RMSNorm", "jax": "nnx.RMSNorm", "tf": "keras.layers.RMSNormalization"}
    method = {"torch": "forward", "jax": "__call__", "tf": "call"}
    found: dict[str, list[tuple[str, str, str]]] = {
        "numpy": [("layers", "rms_norm(x, self.", "rms_norm(x - x.mean(-1, keepdims=True), self.")]
    }
    for port, name in base.items():
        start = f"class RMSNorm({'Configured, ' if port == 'tf' else ''}"
        centered = (
            f"class Centered({name}):\n    def {method[port]}(self, x):\n"
            f"        return {name}.{method[port]}(self, x - {mean[port]})\n\n\n"
        )
        found[port] = [("layers", f"{start}{name})", f"{centered}{start}Centered)")]
    return found


ENTRIES: Table = {
    f"encoder.{BIAS}": {
        "distance 0 in the buckets of later keys": instead("relative_position", "(distance > 0", "(distance >= 0"),
        "sign of the distance reversed": instead("relative_position", HALVED, f"    distance = -distance\n{HALVED}"),
        "one bucket too few": instead("relative_position", "num_buckets - 1", "num_buckets - 2"),
        "the encoder's bias ignores later keys": instead("encoder", "bidirectional=True", "bidirectional=False"),
        "relative position tables of encoder and decoder swapped": but(
            convert=swapped("encoder.relative_bias.table", "decoder.relative_bias.table")
        ),
    },
    ("output", "relative_bias/encoder"): {
        "distances at bucket boundaries in the previous bucket": instead(
            "relative_position", "+ ROUNDING", "- ROUNDING"
        ),
    },
    f"decoder.{BIAS}": {
        "the decoder's bias has buckets for later keys": instead(
            "decoder", "bidirectional=False", "bidirectional=True"
        ),
    },
    f"{SELF}.scores": {
        "scores divided by sqrt(d_k)": but(config={"scale_scores": True}),
    },
    LATER: {
        "relative position bias only in the first layer": changed(
            "encoder",
            ('f"layers.{i}"), bias)', 'f"layers.{i}"), None if i else bias)'),
            numpy=("rng, bias)", "rng, None if i else bias)"),
            tf=('f"layers.{i}"), bias=bias)', 'f"layers.{i}"), bias=None if i else bias)'),
        ),
    },
    f"{CROSS}.scores": {"relative position bias in cross-attention": _in_cross_attention()},
    f"{SELF}_norm.output": {"mean subtracted in RMSNorm": _with_mean()},
    SOURCE: {"embedding scaled by sqrt(d_model)": but(config={"scale_embedding": True})},
    "logits": {"logits of tied embeddings not scaled": but(config={"scale_logits": False})},
}
GATED: Table = {
    f"{ENCODER}.feed_forward.gate": {
        "gate and value swapped": together(
            instead("feed_forward", ACTIVATED, ACTIVATED.replace("gate", "inner")),
            instead("feed_forward", "gate * self.inner_proj(x)", "gate * self.gate_proj(x)"),
        ),
        "exact GELU in the gate": but(config={"activation": "gelu"}),
    },
    f"{ENCODER}.feed_forward.inner": {
        "feed-forward network without a gate": instead("feed_forward", "gate * self.inner_proj(x)", "gate"),
    },
}
T5: list[Bug] = [*table(ENTRIES, case="preset/t5"), *table(GATED, case="preset/t5_v1_1")]
SEARCH: list[Bug] = table(
    {
        "logits": {
            "every step uses the relative positions of the first step": changed(
                "decoder", ("self._bias(cache.length,", "self._bias(0,"), torch=("self._bias(n,", "self._bias(0,")
            )
        }
    },
    case="decode/t5_greedy",
)
