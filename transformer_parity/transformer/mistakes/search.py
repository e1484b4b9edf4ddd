"""Known mistakes of decoding, as data: what each changes in a port, and where it must show.

A mistake in the cache shows in the logits of positions that are decoded one after another. One in the search leaves
them alone, and shows in the tokens or in the scores.
"""

from __future__ import annotations

from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.mistakes.mistake import Edits, Mistake, but, changed, instead, table, together
from transformer_parity.transformer.stages.decode import SCORES, TOKENS

LOGITS = "logits"
CASES = {case.name: case for case in standard_cases() if case.search is not None}
GREEDY, BEAM = "decode/ends_apart_greedy", "decode/ends_apart_beam"
MARIAN = "decode/marian_greedy"  # starts with padding
OPUS, BART, FAIRSEQ = "decode/rules_of_opus", "decode/rules_of_bart", "decode/rules_of_fairseq"
MARIAN_CPP = "decode/rules_of_marian"
SCORED_END, SCORED_TOKEN = 'scored=rules.at_limit == "scored"', "scored=rules.score_forced"
PASTS = "[None] * (len(self.layers) - len(cache.past)) + cache.past"
OTHERS = "(cache.past + [None])[: len(self.layers)]"
OTHER = "decode/other_decoder_greedy"  # whose first layer has no self-attention
# The ports whose numbers depend on the lengths to which they pad.
OWN = {"own_numbers": ("jax", "tf")}

HOLDS_TOKEN = "(ids != self.config.pad_id) | (n == 0)"
NORMED = "\n        if self.target_embedding_norm is not None:"
PENALISED = "best / plan.penalties[n]"
LONGEST = 'longest = n if plan.rules.stop == "current" else plan.limits'

TWICE_THE_BEAM = together(
    instead("search", "-inf)[:, :beam_size]", "-inf)"), instead("search", "candidates[:, :beam_size]]", "candidates]")
)
PLANNED = {
    **dict.fromkeys(("numpy", "jax", "tf"), "search.plan(model.config, source_mask)\n"),
    "torch": "search.plan(model.config, source_mask.cpu().numpy())\n",
}
POSITION = "cache.positions[n]"
ANY_PADDING = {
    "numpy": ("log_softmax(logits)", "log_softmax(np.where(np.arange(logits.shape[1]) == plan.pad_id, -inf, logits))"),
    "torch": (
        "logits.log_softmax(-1,",
        "logits.masked_fill(torch.arange(logits.shape[1]) == plan.pad_id, -inf).log_softmax(-1,",
    ),
    "jax": (
        "jax.nn.log_softmax(logits.astype(",
        "jax.nn.log_softmax(jnp.where(jnp.arange(logits.shape[1]) == plan.pad_id, -inf, logits).astype(",
    ),
    "tf": (
        "tf.nn.log_softmax(tf.cast(logits, wide))",
        "tf.nn.log_softmax("
        "tf.where(tf.range(logits.shape[1]) == plan.pad_id, tf.cast(-inf, wide), tf.cast(logits, wide)))",
    ),
}


def planned(*lines: str) -> Edits:
    """Return edits that change the plan of a search, or the mask of the source, before it starts."""
    more = "".join(f"    {line}\n" for line in lines)
    return instead("search_loop", PLANNED, **{port: f"{text}{more}" for port, text in PLANNED.items()})


def penalised(penalties: str) -> Edits:
    """Return edits of the length penalties of beam search; ``n`` are the lengths, ``alpha`` the exponent."""
    return planned(
        "n, alpha = __import__('numpy').arange(len(plan.penalties)), search.length_penalty",
        f"plan = plan if search.beam_size is None else plan._replace(penalties={penalties})",
    )


def starting_with(token: str) -> Edits:
    """Return edits that start every search with another token."""
    return together(
        instead("search", "(size, plan.start_id", f"(size, {token}"),
        instead("search", "(shape, plan.start_id", f"(shape, {token}"),
    )


def reordered(layers: str) -> Edits:
    """Return edits that reorder the cache of some layers only."""
    return instead("decoder", "for past in self.past:", f"for past in self.past[{layers}]:")


NGRAMS = {1: "token", 2: "bigram", 3: "trigram", 4: "4-gram"}  # that a sentence may not hold twice


def ruled(rules: str) -> Edits:
    """Return edits that change some of the rules of every search."""
    return planned("from dataclasses import replace", f"plan = plan._replace(rules=replace(plan.rules, {rules}))")


def repetition_penalty(penalty: float, log_probabilities: str) -> Edits:
    """Return edits of the reference by which tokens that a hypothesis holds, its start symbol included, score less.

    Args:
        penalty: What a positive score is divided by, and a negative one multiplied with.
        log_probabilities: Whether it changes these in place of logits: an expression.
    """
    usual = "    log_probabilities = log_softmax(logits)\n"
    lines = f"""\
    in_place = {log_probabilities}
    scores = log_softmax(logits) if in_place else logits
    held = np.concatenate([np.full([len(logits), 1], plan.start_id), ids.reshape(len(logits), -1)[:, : n - 1]], 1)
    held = (held[:, :, None] == np.arange(logits.shape[1])).any(1)
    scores = np.where(held, np.where(scores < 0, scores * {penalty}, scores / {penalty}), scores)
    log_probabilities = scores if in_place else log_softmax(scores)
"""
    return changed("search", numpy=(usual, lines))


# Only hypotheses: with one hypothesis, a search finds fewer than the cases of the packages ask for, and few sentences
# show a rule.
ONLY_HYPOTHESES = [
    *(Mistake(f"no {words} twice", "", ruled(f"no_repeat_ngram_size={size}")) for size, words in NGRAMS.items()),
    Mistake("the end symbol is forced at the maximum length, as if it were certain", "", ruled("at_limit='forced'")),
    Mistake("the beam has one hypothesis only", "", planned("plan = plan._replace(beam_size=1)")),
    Mistake(
        "greedy search instead of beam search",
        "",
        planned(
            "from dataclasses import replace",
            "plan = plan._replace(beam_size=1, rules=replace(plan.rules, stop='first'))",
        ),
    ),
]

CATALOGUE = [
    *table(
        {
            LOGITS: {
                "every position is the first": changed(
                    "transformer",
                    ("cache.positions[n]", "cache.positions[n * 0]"),
                    tf=("(cache.positions, n)", "(cache.positions, n * 0)"),
                    torch=("cache.positions[new]", "cache.positions[:1]"),
                ),
                "every position is one late": but(
                    changed(
                        "transformer",
                        ("cache.positions[n]", "cache.positions[n - 1]"),
                        tf=("(cache.positions, n)", "(tf.roll(cache.positions, 1, 0), n)"),
                        torch=("cache.positions[new]", "cache.positions.roll(1, 0)[new]"),
                    ),
                    **OWN,
                ),
                "padding in the past is seen": changed(
                    "transformer",
                    (HOLDS_TOKEN, "(ids == ids)"),
                    torch=("= ids != self.config.pad_id", "= True"),
                ),
                "a start symbol that is padding is hidden": but(
                    changed(
                        "transformer",
                        (HOLDS_TOKEN, "(ids != self.config.pad_id)"),
                        torch=("if new.start == 0:", "if False:"),
                    ),
                    case=MARIAN,
                ),
                "padding in the source is seen": but(instead("decoder", "cache.cross_mask,", "None,"), **OWN),
                "all layers attend to the first layer's memory": instead(
                    "decoder", "cache.memory, pasts,", "cache.memory[:1] * len(cache.memory), pasts,"
                ),
                "no norm on the embedding": but(
                    changed(
                        "transformer",
                        ("cache.positions[n]  # [R, L, d_model]" + NORMED, "cache.positions[n]\n        if False:"),
                        torch=(
                            "cache.positions[new]  # [R, L, d_model]" + NORMED,
                            "cache.positions[new]\n        if 0:",
                        ),
                        tf=(
                            "(cache.positions, n)  # [R, L, d_model]" + NORMED,
                            "(cache.positions, n)\n        if False:",
                        ),
                    ),
                    case=OTHER,
                ),
                # In the others, the mask does not fit what is left.
                "the past of another layer": but(
                    {
                        "numpy": [("decoder", PASTS, OTHERS)],
                        "torch": [  # whose layers have one length
                            ("decoder", PASTS, OTHERS),
                            ("decoder", "past.value, n) if", "past.value, getattr(cache, 'n', 0)) if"),
                            ("decoder", "cache.length = end", "cache.n = getattr(cache, 'n', 0) + 1"),
                        ],
                    },
                    case=OTHER,
                ),
                "the last value stands for all": changed(
                    "attention",
                    (
                        "self.key[:, :, new], self.value[:, :, new] = key, value",
                        "self.key[:, :, new], self.value = key, value + 0 * self.value",
                    ),
                    jax=(
                        "self.value = jax.lax.dynamic_update_slice_in_dim(self.value, value, self.length, axis=2)",
                        "self.value = value + 0 * self.value",
                    ),
                    tf=(
                        "self.value = keras.ops.slice_update(self.value, start, value)",
                        "self.value = value + 0 * self.value",
                    ),
                ),
            }
        },
        case=GREEDY,
        path="cached",
    ),
    *table(
        {
            (TOKENS, BEAM): {
                "hypotheses attend to the memory of other sentences": changed(
                    "attention",
                    (
                        "query.reshape(len(memory.key), -1, shape[-1])",
                        "query.reshape(-1, len(memory.key), shape[-1]).swapaxes(0, 1)",
                    ),
                    tf=(
                        "tf.reshape(query, [keras.ops.shape(memory.key)[0], -1, query.shape[2]])",
                        "tf.transpose("
                        "tf.reshape(query, [-1, keras.ops.shape(memory.key)[0], query.shape[2]]), [1, 0, 2])",
                    ),
                )
            },
            (TOKENS, GREEDY): {
                "goes on after the end symbol": instead("search", "(tokens != plan.eos_id) & ", ""),
                "stops a token early": but(
                    instead("search", "& (n < ", "& (n + 1 < "), case="decode/paper_base_greedy"
                ),
            },
            (SCORES, GREEDY): {
                "scores what comes after the end": instead(
                    "search", "where(self.unfinished, best", "where(self.unfinished | True, best"
                ),
                "scores are logits": changed(
                    "search",
                    numpy=("log_softmax(logits)", "logits.copy()"),
                    torch=(
                        "logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))",
                        "logits.clone()",
                    ),
                    jax=("jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))", "logits"),
                    tf=("tf.nn.log_softmax(tf.cast(logits, wide))", "logits"),
                ),
            },
        },
        path="fast",
    ),
    *table(
        {
            TOKENS: {
                "the cache is not reordered": instead("search_loop", "cache.reorder(rows)", "pass"),
                "the cache follows hypotheses that have ended": changed(
                    "search",
                    ("token[sentence, rank], parent[sentence, rank]", "token[sentence, rank], parent[:, :beam_size]"),
                    tf=(
                        "(tf.gather(x, rank, batch_dims=1) for x in (candidates, token, parent))",
                        "(*(tf.gather(x, rank, batch_dims=1) for x in (candidates, token)), parent[:, :beam_size])",
                    ),
                ),
                "no length penalty": instead("search", PENALISED, "best / 1.0"),
                "the end symbol has no length": instead("search", PENALISED, "best / plan.penalties[n - 1]"),
                "stops at the first hypotheses that end": instead(
                    "search", "finished[:, -1] >= attainable", "finished[:, -1] > -9e9"
                ),
                "stops by the current length": instead("search", LONGEST, "longest = n"),
                "ended hypotheses go on": instead("search", "where(~ends, best", "where(ends | True, best"),
                "stops a token early": instead("search", "limits == n)", "limits == n + 1)"),
                "hypotheses outside the beam may end": but(TWICE_THE_BEAM, case="decode/paper_base_beam"),
            }
        },
        case=BEAM,
        path="fast",
    ),
    *table(
        {
            (TOKENS, OPUS): {
                "stops by the maximum length": instead("search", LONGEST, "longest = plan.limits"),
                "the pool holds what is returned": instead(
                    "search", "finished[:, -1] >= attainable", "finished[:, plan.num_hypotheses - 1] >= attainable"
                ),
                "banned tokens are generated": instead("search_rules", "if rules.banned_ids:", "if False:"),
                "what is banned keeps its share": instead("search_rules", " if rules.renormalize ", " if False "),
            },
            (TOKENS, BART): {
                "goes on with a full pool": instead("search", 'plan.rules.stop == "first"', "False"),
                "the forced end has its own score": instead("search_rules", SCORED_END, "scored=True"),
                "the end is forced a token early": instead("search_rules", "plan.limits == n", "plan.limits == n + 1"),
                "the forced token has its own score": instead("search_rules", SCORED_TOKEN, "scored=True"),
                "the second token is forced": instead("search_rules", "plan.prefix[:, n - 1]", "plan.prefix[:, n - 2]"),
                "n-grams are a token too short": instead(
                    "search_rules", "for back in range(1, size):", "for back in range(1, size - 1):"
                ),
                "the last n-gram may be repeated": changed(
                    "search_rules",
                    ("tokens.shape[1]) < n, last.shape)", "tokens.shape[1]) < n - 1, last.shape)"),
                    torch=("device=ids.device) < n)", "device=ids.device) < n - 1)"),
                    tf=("keras.ops.shape(tokens)[1]) < n, ", "keras.ops.shape(tokens)[1]) < n - 1, "),
                ),
            },
            (TOKENS, FAIRSEQ): {
                "the pool keeps the best": instead("search", 'plan.rules.pool == "first"', "False"),
                "the forced token is certain": instead("search_rules", SCORED_TOKEN, "scored=False"),
                "the forced end is certain": instead("search_rules", SCORED_END, "scored=False"),
            },
            (TOKENS, MARIAN_CPP): {
                "the beam keeps its size": instead("search", "plan.rules.beam_shrinks", "False"),
            },
        },
        path="fast",
    ),
    *table(
        {
            LOGITS: {
                "every position but the first is one late": changed(
                    "transformer",
                    (POSITION, "cache.positions[np.maximum(n - 1, 0)]"),
                    torch=("cache.positions[new]", "cache.positions[max(new.start - 1, 0)]"),
                    jax=(POSITION, "cache.positions[jnp.maximum(n - 1, 0)]"),
                    tf=("(cache.positions, n)", "(cache.positions, tf.maximum(n - 1, 0))"),
                ),
            }
        },
        case=GREEDY,
        path="cached",
    ),
    *table(
        {
            (SCORES, GREEDY): {"padding is excluded before the log-softmax": changed("search", **ANY_PADDING)},
            (TOKENS, GREEDY): {
                "starts with padding": starting_with("plan.pad_id"),
                "goes on after padding": instead(
                    "search", "unfinished = self.unfinished & (tokens", "unfinished = (tokens"
                ),
                "source padding is seen by the search": planned("source_mask = source_mask | True"),
            },
        },
        path="fast",
    ),
    *table(
        {
            TOKENS: {
                "the end symbol is forbidden in the first step": planned("plan = plan._replace(min_length=2)"),
                "the end symbol is forbidden in the first two steps": planned("plan = plan._replace(min_length=3)"),
                "scores multiplied by the length penalty": penalised("1.0 / plan.penalties"),
                "length penalty with an alpha of 0.6": penalised("((5.0 + n) / 6.0) ** 0.6"),
                "length penalty with an alpha of 1": penalised("(5.0 + n) / 6.0"),
                "scores averaged over the tokens": penalised("1.0 * n"),
                "ends as soon as the beam's number of hypotheses have ended": planned(
                    "from dataclasses import replace",
                    "plan = plan._replace(pool_size=plan.beam_size, rules=replace(plan.rules, stop='first'))",
                ),
                "the beam has one hypothesis less": planned(
                    "plan = plan._replace(beam_size=max(plan.beam_size - 1, 1))"
                ),
                "the cache of the first layer is not reordered": reordered("1:"),
                "only the cache of the first layer is reordered": reordered(":1"),
                "only the cached keys are reordered": changed(
                    "attention",
                    numpy=("        self.value[:, :, : self.length] = self.value[rows, :, : self.length]\n", ""),
                    torch=(
                        "        self.value[:, :, : self.length] ="
                        " self.value[:, :, : self.length].index_select(0, rows)\n",
                        "",
                    ),
                    jax=("self.key[rows], self.value[rows]", "self.key[rows], self.value"),
                    tf=("        self.value = tf.gather(self.value, rows)\n", ""),
                ),
                "only the cached values are reordered": changed(
                    "attention",
                    numpy=("        self.key[:, :, : self.length] = self.key[rows, :, : self.length]\n", ""),
                    torch=(
                        "        self.key[:, :, : self.length] = self.key[:, :, : self.length].index_select(0, rows)\n",
                        "",
                    ),
                    jax=("self.key[rows], self.value[rows]", "self.key, self.value[rows]"),
                    tf=("        self.key = tf.gather(self.key, rows)\n", ""),
                ),
            }
        },
        case=BEAM,
        path="fast",
    ),
]
