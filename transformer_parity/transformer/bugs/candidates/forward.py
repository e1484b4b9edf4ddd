"""Bugs that serve only as candidates for the diagnosis: variants of the forward-pass bugs in the catalog."""

from __future__ import annotations

from transformer_parity.transformer.bugs.bug import Bug, Edits, changed

# Expressions in ``x`` for activations that a port may use instead of ReLU.
ACTIVATIONS = {
    "leaky ReLU with slope 0.01": "np.where(x > 0.0, x, 0.01 * x)",
    "leaky ReLU with slope 0.1": "np.where(x > 0.0, x, 0.1 * x)",
    "leaky ReLU with slope 0.2": "np.where(x > 0.0, x, 0.2 * x)",
    "ReLU6": "np.clip(x, 0.0, 6.0)",
    "squared ReLU": "np.maximum(x, 0.0) ** 2",
    "ELU": "np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0)))",
    "softplus": "np.logaddexp(x, 0.0)",
    "tanh": "np.tanh(x)",
    "sigmoid": "1.0 / (1.0 + np.exp(-x))",
    "x * sigmoid(1.702 x)": "x / (1.0 + np.exp(-1.702 * x))",
}
NORM = "return layer_norm(x, self.scale, self.bias, self.epsilon, self.kind)"
OUTPUT, QUERY = "self.output_proj(merge_heads(context))", "split_heads(self.query_proj(query)"
KEY, VALUE = "split_heads(self.key_proj(memory)", "split_heads(self.value_proj(memory)"
MULTIPLIER = "self.multiplier = math.sqrt(config.d_model)"
SCORES = "query @ key.mT / math.sqrt(d_k)"
ENCODED = "memory = self._encode(source_ids, source_mask, tap, rng)\n        return self._decode"
STACK = 'x = layer(x, mask, within(tap, f"layers.{i}"), rng, bias)'
OUTPUT_TAP = 'self.dropout(tap("output", x), rng, tap, "output")'
MEMORY = f"x = self.final_norm(x)\n        return {OUTPUT_TAP}"
SHIFTED = {
    "right, starting with BOS": ("np.pad(target_ids[:, :-1], ((0, 0), (1, 0)), constant_values=self.config.bos_id)"),
    "right, starting with padding": "np.pad(target_ids[:, :-1], ((0, 0), (1, 0)), constant_values=self.config.pad_id)",
    "right, starting with the last token": "np.roll(target_ids, 1, 1)",
    "left, ending with padding": "np.pad(target_ids[:, 1:], ((0, 0), (0, 1)), constant_values=self.config.pad_id)",
    "left, ending with the first token": "np.roll(target_ids, -1, 1)",
}
SOURCE_MASKS = {
    "the source's padding mask negated, in encoder and cross-attention": "~source_mask",
    "a source mask that ends one token too early": "source_mask & (np.cumsum(source_mask, 1) < lengths)",
    "a source mask that ends one token too early, but keeps the first one": (
        "source_mask & ((np.cumsum(source_mask, 1) < lengths) | (np.arange(source_mask.shape[1]) == 0))"
    ),
    "a source mask that hides EOS": "source_mask & (source_ids != self.config.eos_id)",
    "a source mask that hides EOS, except as the first token": (
        "source_mask & ((source_ids != self.config.eos_id) | (np.arange(source_mask.shape[1]) == 0))"
    ),
    "a source mask that hides BOS": "source_mask & (source_ids != self.config.bos_id)",
}


def in_transformer(*changes: tuple[str, str]) -> Edits:
    """Return edits to the reference's ``transformer`` module."""
    return {"numpy": [("transformer", *change) for change in changes]}


CANDIDATES = [
    Bug(name, "", edits)
    for name, edits in {
        **{
            f"{name} instead of {usual}": changed(
                "functional", numpy=(f'"{key}": {key},', f'"{key}": lambda x: {formula},')
            )
            for usual, key in (("ReLU", "relu"), ("GELU", "gelu"))
            for name, formula in ACTIVATIONS.items()
        },
        "norm multiplied by 1 + scale": changed("layers", numpy=(NORM, NORM.replace("scale", "scale + 1.0"))),
        "a norm without its scale": changed("layers", numpy=(NORM, NORM.replace("self.scale", "1.0"))),
        "a norm without its bias": changed("layers", numpy=(NORM, NORM.replace("self.bias", "0.0"))),
        "a norm without its scale and bias": changed(
            "layers", numpy=(NORM, NORM.replace("self.scale", "1.0").replace("self.bias", "0.0"))
        ),
        "missing norm": changed("layers", numpy=(NORM, "return x")),
        "no output projection": changed("attention", numpy=(OUTPUT, "merge_heads(context)")),
        "no query projection": changed("attention", numpy=(QUERY, "split_heads(query")),
        "no key projection": changed("attention", numpy=(KEY, "split_heads(memory")),
        "no value projection": changed("attention", numpy=(VALUE, "split_heads(memory")),
        "embedding multiplied by d_model": changed("embedding", numpy=(MULTIPLIER, "self.multiplier = config.d_model")),
        "embedding divided by sqrt(d_model)": changed(
            "embedding", numpy=(MULTIPLIER, "self.multiplier = config.d_model**-0.5")
        ),
        **{
            f"embedding factor sqrt(d_model) rounded to {dtype}": changed(
                "embedding", numpy=(MULTIPLIER, f'{MULTIPLIER.replace("= ", "= float(np.array(")}).astype("{dtype}"))')
            )
            for dtype in ("float32", "bfloat16")
        },
        "sqrt(d_k) rounded to float32": changed(
            "attention", numpy=(SCORES, "query @ key.mT / float(np.float32(math.sqrt(d_k)))")
        ),
        **{
            f"decoder input shifted {words}": in_transformer(
                (ENCODED, f'target_ids, target_mask = self._take("target", {ids}, None)\n        {ENCODED}')
            )
            for words, ids in SHIFTED.items()
        },
        **{
            name: in_transformer(
                (
                    ENCODED,
                    f"lengths = source_mask.sum(1, keepdims=True)\n        source_mask = {formula}\n        {ENCODED}",
                )
            )
            for name, formula in SOURCE_MASKS.items()
        },
        "cross-attention to the embedded source": in_transformer(
            (
                ENCODED,
                ENCODED.replace(
                    "        return",
                    "        memory = self.source_position(self.source_embedding(source_ids))\n        return",
                ),
            )
        ),
        "cross-attention to the output of the first encoder layer": {
            "numpy": [
                ("encoder", STACK, f"{STACK}\n            first = first if i else x"),
                ("encoder", MEMORY, f"{MEMORY.replace('return ', '')}\n        return first"),
            ]
        },
        "cross-attention to the memory before the final norm": {
            "numpy": [
                (
                    "encoder",
                    MEMORY,
                    'x, before = self.final_norm(x), x\n            tap("output", x)\n            return before\n'
                    f"        return {OUTPUT_TAP}",
                )
            ]
        },
    }.items()
]
