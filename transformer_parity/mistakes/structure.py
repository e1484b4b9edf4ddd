"""Mistakes of structure, of weights and of edge cases: taps, shapes and dtypes, misplaced weights, unusual inputs."""

from __future__ import annotations

from transformer_parity.compare.findings import FAILED
from transformer_parity.mistakes.mistake import (
    CAUSAL,
    CROSS,
    ENCODER,
    FOUR,
    SELF,
    SOURCE,
    TARGET,
    Edits,
    Mistake,
    in_ports_alone,
    instead,
    swapped,
    together,
    transposed,
)

PROJECTED = "self.output_proj(merge_heads(context))"
LOGITS = {
    "numpy": 'tap("logits", self.output_proj(x, self.target_embedding.table))',
    "torch": 'tap("logits", self.output_proj(x, self.target_embedding.table))',
    "jax": 'tap("logits", self.output_proj(x, self.target_embedding.table[...]))',
}
UNMASKED = "    if mask is None:"
ENCODED, THEN = "self._encode(source_ids, source_mask", "        return self._decode"
WIDE_LOGITS = 'tap("logits", x.float() @ self.target_embedding.table.float().T)'  # not of widened bfloat16 values
QUERY_TAP = 'q = tap("query", split_heads(self.query_proj(query), self.num_heads))  # [B, H, L, d_k]\n'
KEY_TAP = 'k = tap("key", k)  # [B, H, M, d_k]\n'


def one_value(value: str) -> Edits:
    """Return edits that set one number of the attention's output."""
    returned = f'return tap("output", {PROJECTED}.reshape(shape))'
    spoilt = f"x = {PROJECTED}\n        x[0, 0, 0] = {value}\n        return tap('output', x)"
    return {
        "torch": [("attention", returned, spoilt)],
        "jax": [("attention", PROJECTED, f"{PROJECTED}.at[0, 0, 0].set({value})")],
    }


# The padding mask of the first batch of a shape is kept for all later ones.
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
        in_ports_alone(instead("attention", 'tap("context", weights @ value)', "weights @ value")),
        announced=f"missing {SELF}.context, encoder.layers.1.self_attention.context, {CAUSAL}.context and 3 more",
    ),
    Mistake(
        "a tap of another name",
        "",
        in_ports_alone(instead("attention", 'tap("weights", masked', 'tap("probabilities", masked')),
        announced=f"missing {SELF}.weights",
    ),
    Mistake(
        "a tap too many",
        "",
        in_ports_alone(
            instead("attention", 'tap("context", weights @ value)', 'tap("mean", tap("context", weights @ value))')
        ),
        announced=f"unexpected {SELF}.mean",
    ),
    Mistake(
        "taps in another order",
        "",
        in_ports_alone(
            together(
                instead("attention", QUERY_TAP, "\n"),
                instead("attention", KEY_TAP, f"{KEY_TAP}            {QUERY_TAP}"),
            )
        ),
        announced=f"{SELF}.key fired where {SELF}.query was due",
    ),
    Mistake(
        "a tap that fires twice",
        "",
        in_ports_alone(instead("attention", 'tap("weights", masked', 'tap("scores", masked')),
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
            numpy=LOGITS["numpy"].replace("table)", 'table).astype("float32")'),
            torch=LOGITS["torch"].replace("table)", "table).float()"),
            jax=LOGITS["jax"].replace("[...])", '[...]).astype("float32")'),
        ),
        detail="dtype must be float64: got float32",
    ),
    Mistake(
        "float32 logits in bfloat16",
        "logits",
        {"torch": [("transformer", LOGITS["torch"], WIDE_LOGITS)]},
        dtype="bfloat16",
        detail="dtype must be bfloat16: got float32",
    ),
    Mistake(
        "probabilities for logits",
        "output",
        {
            "numpy": [
                ("transformer", "import Dropout\n", "import Dropout, masked_softmax\n"),
                ("transformer", LOGITS["numpy"], f"masked_softmax({LOGITS['numpy']})"),
            ],
            "torch": [("transformer", LOGITS["torch"], f"{LOGITS['torch']}.softmax(-1)")],
            "jax": [("transformer", LOGITS["jax"], f"jax.nn.softmax({LOGITS['jax']})")],
        },
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
        instead(
            "transformer", LOGITS, numpy=f"{LOGITS['numpy']}.swapaxes(0, 1)", torch=f"{LOGITS['torch']}.transpose(0, 1)"
        ),
        detail="shape must be [4, 7, 37]: got [7, 4, 37]",
    ),
    Mistake(
        "axes of size one squeezed",
        "output",
        instead("transformer", LOGITS, numpy=f"{LOGITS['numpy']}.squeeze()", torch=f"{LOGITS['torch']}.squeeze()"),
        case="full/one_sentence",
        detail="shape must be [1, 7, 37]: got [7, 37]",
        unseen=("full/padded",),
    ),
    Mistake(
        "an exception",
        "",
        in_ports_alone(
            instead("encoder", "for i, layer in", 'raise NotImplementedError("later")\n        for i, layer in')
        ),
        path="run",
        verdict=FAILED,
        detail="later",
    ),
    Mistake(
        "queries and memory of cross-attention swapped, of other lengths",
        "",
        in_ports_alone(instead("decoder", "self.cross_attention(x, memory,", "self.cross_attention(memory, x,")),
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
            "tf": [("transformer", f"{ENCODED}, tap, training)\n{THEN}", f"{ENCODED}, tap, True)\n{THEN}")],
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
        {
            "numpy": [("weights", "parameter[...] = ", 'parameter[...] = 0.0 if name.endswith("norm.bias") else ')],
            "tf": [("weights", "parameter.assign(", 'name.endswith("norm.bias") or parameter.assign(')],
        },
        announced=f"{SELF}_norm.bias does not come back as it was given",
    ),
    Mistake(
        "weights stored in float16",
        SOURCE,
        {
            port: [("weights", f"rounded(name, {array},", f'rounded(name, {array}.astype("float16"),')]
            for port, array in {**dict.fromkeys(FOUR, "weights[name]"), "torch": "array"}.items()
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
        "",
        {"torch": [("weights", "copy_((bits.T if name", "copy_((bits if name")]},
        path="run",
        verdict=FAILED,
        detail="RuntimeError: The size of tensor",
    ),
]

EDGES = [
    # Each shows in a case of its own.
    Mistake(
        "every head has the mask of the first",
        "weights",
        {
            **instead("layers", UNMASKED, f"    mask = None if mask is None else mask[:, :1]\n{UNMASKED}"),
            "numpy": [("functional", "np.where(mask, inf", "np.where(mask[:, :1], inf")],
        },
        case="attention/fully_masked_row",
        unseen=("full/padded",),
    ),
    Mistake(
        "positions end at max_length",
        "output",
        {
            "torch": [("embedding", "length, device=device)", "length, device=device).clamp(max=31)")],
            **{
                port: [("embedding", "(offset, offset + length)", "(offset, offset + length).clip(max=31)")]
                for port in ("numpy", "jax")
            },
        },
        case="embedding/long_positions",
        unseen=("full/padded",),
    ),
    Mistake(
        "encode without padding mask",
        f"{SELF}.weights",
        {port: [("transformer", f"return {ENCODED}", f"return {ENCODED} | True")] for port in ("numpy", "torch")},
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
        "",
        in_ports_alone(instead("decoder", "config.num_decoder_layers", "config.num_encoder_layers")),
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
        instead(
            "transformer",
            "self.target_embedding(target_ids)",
            "self.source_embedding(target_ids % self.config.source_vocab_size)",
        ),
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
