"""Bugs that cause wrong taps, shapes, dtypes, or weights, and bugs that occur only with unusual inputs or models."""

from __future__ import annotations

from transformer_parity.engine.findings import FAILED
from transformer_parity.transformer.bugs.bug import (
    CAUSAL,
    CROSS,
    ENCODER,
    FOUR,
    SELF,
    SOURCE,
    TARGET,
    Bug,
    Edit,
    Edits,
    but,
    changed,
    in_ports_alone,
    instead,
    swapped,
    table,
    together,
    transposed,
)

PROJECTED = "self.output_proj(merge_heads(context))"
# Edits that disable PyTorch's check of a tied output projection.
WITHOUT_CHECK_OF_TIE: dict[str, list[Edit]] = {
    **{port: [] for port in FOUR},
    "torch": [("weights", "output.embedding not in model.target_embedding.modules()", "False")],
    "jax": [("weights", "is_tied and matrix is not find(model, owner).embedding", "False")],
}
LOGITS = 'tap("logits", self.output_proj(x))'
RETURNED = f"return {LOGITS}\n"  # this text occurs in the forward pass but not in the decoding step
UNMASKED = "    if mask is None:"
ENCODE = '        source_ids, source_mask = self._take("source", source_ids, source_mask)\n        return'
DECODE = "        memory, source_mask = self._take_memory(memory, source_ids, source_mask)\n"
LOOKED_UP, GIVEN = "TokenEmbedding(config.source_vocab_size, config", 'mask = to_mask("source_mask", mask'
ENCODED = "memory = self._encode(source_ids, "
ALL_TOKENS = '__import__("numpy").ones(source_ids.shape, bool)'
NO_MASK = f"        source_mask = {ALL_TOKENS} if source_mask is None else source_mask\n"
WIDE_LOGITS = 'tap("logits", x.float() @ self.target_embedding.weight.float().T)'  # computed in float32
QUERY_TAP = 'q = tap("query", split_heads(self.query_proj(query), self.num_heads))  # [B, H, L, d_k]\n'
KEY_TAP = 'k = tap("key", k)  # [B, H, M, d_k]\n'


def one_value(value: str) -> Edits:
    """Return edits that overwrite one element of the attention output with the given value."""
    returned = f'return tap("output", {PROJECTED}.reshape(shape))'
    spoilt = f"x = {PROJECTED}\n        x[0, 0, 0] = {value}\n        return tap('output', x)"
    return changed("attention", torch=(returned, spoilt), jax=(PROJECTED, f"{PROJECTED}.at[0, 0, 0].set({value})"))


# This bug computes a padding mask for the first batch of each shape and reuses it for later batches of the same shape.
STALE = Bug(
    "mask cached from an earlier batch",
    f"{SELF}.weights",
    instead(
        "part",
        "        return ids, (padding_mask if",
        torch="        kept = self.__dict__.setdefault('kept', {})\n"
        "        if side == 'source':\n"
        "            return ids, kept.setdefault(ids.shape, padding_mask(ids, config.pad_id))\n"
        "        return ids, (padding_mask if",
    ),
    case="full/source_all_padding",
)

STRUCTURE = table(
    {
        f"{SELF}.output": {
            "one value is NaN": but(one_value("math.nan"), detail="1 of 864 values are NaN or infinite"),
            "one value is infinite": but(
                {"torch": one_value("math.inf")["torch"]},
                dtype="bfloat16",
                detail="1 of 864 values are NaN or infinite",
            ),
        },
        "": {
            "missing tap": but(
                in_ports_alone(instead("attention", 'tap("context", weights @ value)', "weights @ value")),
                announced=f"missing {SELF}.context, encoder.layers.1.self_attention.context,"
                f" {CAUSAL}.context and 3 more",
            ),
            "renamed tap": but(
                in_ports_alone(instead("attention", 'tap("weights", masked', 'tap("probabilities", masked')),
                announced=f"missing {SELF}.weights",
            ),
            "extra tap": but(
                in_ports_alone(
                    instead(
                        "attention", 'tap("context", weights @ value)', 'tap("mean", tap("context", weights @ value))'
                    )
                ),
                announced=f"unexpected {SELF}.mean",
            ),
            "taps in a different order": but(
                in_ports_alone(
                    together(
                        instead("attention", QUERY_TAP, "\n"),
                        instead("attention", KEY_TAP, f"{KEY_TAP}            {QUERY_TAP}"),
                    )
                ),
                announced=f"the names must be in the expected order: got {SELF}.key instead of {SELF}.query",
            ),
            "a tap that fires twice": but(
                in_ports_alone(instead("attention", 'tap("weights", masked', 'tap("scores", masked')),
                path="run",
                verdict=FAILED,
                detail="tap encoder.layers.0.self_attention.scores was recorded twice",
            ),
            "an exception": but(
                in_ports_alone(
                    instead("encoder", "for i, layer in", 'raise NotImplementedError("later")\n        for i, layer in')
                ),
                path="run",
                verdict=FAILED,
                detail="later",
            ),
            "query and memory of cross-attention swapped, with different lengths": but(
                in_ports_alone(
                    instead("decoder", "self.cross_attention(x, memory,", "self.cross_attention(memory, x,")
                ),
                path="run",
                verdict=FAILED,
                detail="mask must broadcast to (4, 3, 9, 7): got (4, 1, 1, 9)",
            ),
        },
        "logits": {
            "float32 logits in float64": but(
                instead(
                    "transformer",
                    RETURNED,
                    numpy=RETURNED.replace("(x)", '(x).astype("float32")'),
                    torch=RETURNED.replace("(x)", "(x).float()"),
                    jax=RETURNED.replace("(x)", '(x).astype("float32")'),
                ),
                detail="dtype must be float64: got float32",
            ),
            "float32 logits in bfloat16": but(
                changed("transformer", torch=(RETURNED, f"return {WIDE_LOGITS}\n")),
                dtype="bfloat16",
                detail="dtype must be bfloat16: got float32",
            ),
            "logits of the last position only": but(
                instead("transformer", RETURNED, RETURNED.replace("(x)", "(x[:, -1:])")),
                detail="shape must be [4, 7, 37]: got [4, 1, 37]",
            ),
        },
        "output": {
            "probabilities instead of logits": {
                "numpy": [
                    (
                        "transformer",
                        "from reference_numpy.masks import",
                        "from reference_numpy.layers import masked_softmax\nfrom reference_numpy.masks import",
                    ),
                    ("transformer", RETURNED, f"return masked_softmax({LOGITS})\n"),
                ],
                "torch": [("transformer", RETURNED, f"return {LOGITS}.softmax(-1)\n")],
                "jax": [("transformer", RETURNED, f"return jax.nn.softmax({LOGITS})\n")],
            },
            "time axis before batch axis": but(
                instead(
                    "transformer",
                    RETURNED,
                    numpy=f"return {LOGITS}.swapaxes(0, 1)\n",
                    torch=f"return {LOGITS}.transpose(0, 1)\n",
                ),
                detail="shape must be [4, 7, 37]: got [7, 4, 37]",
            ),
            "axes of size one squeezed": but(
                instead("transformer", RETURNED, **dict.fromkeys(("numpy", "torch"), f"return {LOGITS}.squeeze()\n")),
                case="full/one_sentence",
                detail="shape must be [1, 7, 37]: got [7, 37]",
                unseen=("full/padded",),
            ),
        },
        f"{SELF}.query": {
            "still in training mode": {
                **changed("part", torch=("model.eval()", "model")),
                "jax": [
                    ("part", "        model.eval()\n", ""),
                    ("part", "None if rngs is None else to_rngs(rngs)", "to_rngs(0)"),
                ],
                **changed(
                    "transformer", tf=(f"{ENCODED}source_mask, tap, training)", f"{ENCODED}source_mask, tap, True)")
                ),
            }
        },
    }
)

WEIGHTS = table(
    {
        f"{ENCODER}.feed_forward.inner": {
            "bias loaded from a different layer": but(
                convert=swapped(
                    f"{ENCODER}.feed_forward.inner_proj.bias", "encoder.layers.1.feed_forward.inner_proj.bias"
                )
            )
        },
        f"{SELF}.query": {"a square matrix transposed": but(convert=transposed(f"{SELF}.query_proj.kernel"))},
        SOURCE: {
            "source and target embeddings swapped": but(
                convert=swapped("source_embedding.table", "target_embedding.table"), case="preset/torch"
            ),
            "weights stored in float16": but(
                {
                    port: [("weights", f"rounded(name, {array},", f'rounded(name, {array}.astype("float16"),')]
                    for port, array in {**dict.fromkeys(FOUR, "weights[name]"), "torch": "array"}.items()
                },
                announced="exported source_embedding.table differs from the loaded value",
            ),
        },
        ("encoder.output", "full/deeper_decoder"): {
            "decoder's final norm loaded into the encoder": but(
                convert=swapped("encoder.final_norm.scale", "decoder.final_norm.scale")
            )
        },
        f"{SELF}_norm.output": {
            "norm biases left at zero": but(
                changed(
                    "weights",
                    numpy=("parameter[...] = ", 'parameter[...] = 0.0 if name.endswith("norm.bias") else '),
                    tf=("parameter.assign(", 'name.endswith("norm.bias") or parameter.assign('),
                ),
                announced=f"exported {SELF}_norm.bias differs from the loaded value",
            )
        },
        "": {
            "weights exported in float32": but(
                changed("weights", torch=("tensor.numpy().copy()", "tensor.float().numpy()")),
                announced="exported source_embedding.table differs from the loaded value",
            ),
            "weights missing from the export": but(
                {
                    port: [("weights", f"{all_of_them}}}", f'{all_of_them} if "inner" not in name}}')]
                    for port, all_of_them in {
                        "jax": "_merged(model, name) for name in parameter_shapes(model.config, model.part)",
                        "tf": "_computed_with(model).items()",
                    }.items()
                },
                announced=f"missing {ENCODER}.feed_forward.inner_proj.kernel",
            ),
            "matrices not transposed when loaded": but(
                changed("weights", torch=("whole = (bits.T if name", "whole = (bits if name")),
                path="run",
                verdict=FAILED,
                detail="RuntimeError: The size of tensor",
            ),
        },
    }
)

EDGES = [
    # These bugs have no effect in the default case, ``full/padded``, so each entry specifies a different case.
    *table(
        {
            ("weights", "attention/fully_masked_row"): {
                "all heads use the first head's mask": {
                    **instead("layers", UNMASKED, f"    mask = None if mask is None else mask[:, :1]\n{UNMASKED}"),
                    **changed("functional", numpy=("np.where(mask, scores", "np.where(mask[:, :1], scores")),
                }
            },
            ("output", "embedding/long_positions"): {
                "positions clipped at max_length": changed(
                    "embedding",
                    torch=('offset + length, device="cpu")', 'offset + length, device="cpu").clamp(max=31)'),
                    **dict.fromkeys(
                        ("numpy", "jax"), ("(offset, offset + length)", "(offset, offset + length).clip(max=31)")
                    ),
                )
            },
            (f"{SELF}.weights", "encoder/encode"): {
                "encode without padding mask": changed(
                    "transformer", **dict.fromkeys(("numpy", "torch"), (ENCODE, f"{NO_MASK}{ENCODE}"))
                )
            },
            (f"{CROSS}.weights", "decoder/decode"): {
                "decode without padding mask": instead("transformer", DECODE, f"{NO_MASK}{DECODE}")
            },
            (f"{CROSS}.weights", "decoder/alone"): {
                "standalone decoder attends to padding": instead("part", GIVEN, f"{GIVEN} | bool(self.part)")
            },
            (SOURCE, "encoder/alone"): {
                "standalone encoder does not scale its embedding": instead(
                    "part", LOOKED_UP, f"{LOOKED_UP}.replace(scale_embedding=self.part is None)"
                )
            },
            (f"{SELF}.weights", "full/given_masks"): {
                "given masks ignored": instead(
                    "transformer",
                    f"{ENCODED}source_mask, tap",
                    f'{ENCODED}self._take("source", source_ids, None)[1], tap',
                )
            },
            (f"{CAUSAL}.weights", "full/starts_with_padding"): {
                "BOS treated as padding": instead("masks", " | is_first", "")
            },
            ("", "full/deeper_decoder"): {
                "decoder as deep as the encoder": but(
                    in_ports_alone(instead("decoder", "config.num_decoder_layers", "config.num_encoder_layers")),
                    path="run",
                    verdict=FAILED,
                )
            },
            (f"{CAUSAL}.query", "full/other_decoder"): {
                "decoder uses the encoder's head sizes": but(
                    instead(
                        "decoder",
                        "config = config.in_decoder",
                        "own = config.in_decoder\n"
                        "        config = own.replace(num_heads=config.num_heads, d_k=config.d_k, d_v=config.d_v)",
                    ),
                    detail="shape must be [4, 2, 7, 12]: got [4, 3, 7, 8]",
                )
            },
            ("", "full/other_decoder"): {
                # JAX isn't included: it accepts parameters of any shape, so the bug would have no effect.
                "decoder's feed-forward as wide as the encoder's": but(
                    instead(
                        "decoder",
                        "config = config.in_decoder",
                        **dict.fromkeys(("torch", "tf"), "config = config.in_decoder.replace(d_ff=config.d_ff)"),
                    ),
                    path="run",
                    verdict=FAILED,
                )
            },
            ("logits", "full/tied_target"): {
                "output tied to the source embedding": but(
                    together(
                        instead("part", "(config, self.target_embedding,", "(config, self.source_embedding,"),
                        WITHOUT_CHECK_OF_TIE,
                    ),
                    detail="shape must be [4, 7, 41]: got [4, 7, 37]",
                )
            },
            (TARGET, "full/untied"): {
                "target uses the source embedding": instead(
                    "transformer",
                    "self.target_embedding(target_ids)",
                    "self.source_embedding(target_ids % self.config.source_vocab_size)",
                )
            },
        },
        unseen=("full/padded",),
    ),
    Bug(
        "offset of learned positions ignored",
        "output",
        changed(
            "embedding",
            ("self.table[self.offset : self.offset + ", "self.table[: "),
            tf=("tf.range(self.offset, self.offset + length)", "tf.range(length)"),
            torch=("self.weight[self.offset : self.offset + ", "self.weight[: "),
            jax=("self.embedding[self.offset : self.offset + ", "self.embedding[: "),
        ),
        case="embedding/learned",
    ),
    Bug(
        "softmax that overflows",
        "weights",
        changed("layers", torch=("scores.softmax(-1, dtype)", "(scores.exp() / scores.exp().sum(-1, keepdim=True))")),
        case="attention/sharp",
        dtype="float32",
        detail="values are NaN or infinite",
        unseen=("float64", "attention/no_mask"),
    ),
]
