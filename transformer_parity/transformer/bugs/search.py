"""Catalog of known bugs in decoding.

A bug in the decoder cache changes the logits of tokens that are decoded one at a time. A bug in the search changes only
the returned tokens or scores.
"""

from __future__ import annotations

from transformer_parity.transformer.bugs.bug import Bug, Edits, but, changed, instead, table, together
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.stages.decode import SCORES, TOKENS

LOGITS = "logits"
CASES = {case.name: case for case in standard_cases() if case.search is not None}
GREEDY, BEAM = "decode/ends_apart_greedy", "decode/ends_apart_beam"
MARIAN = "decode/marian_greedy"  # searches start with the padding token
OPUS, BART, FAIRSEQ = "decode/rules_of_opus", "decode/rules_of_bart", "decode/rules_of_fairseq"
MARIAN_CPP = "decode/rules_of_marian"
SCORED_END, SCORED_TOKEN = 'scored=rules.at_limit == "scored"', "scored=rules.score_forced"
PASTS = "[next(stored) if layer.self_attention is not None else None for layer in self.layers]"
OTHERS = "(cache.past + [None])[: len(self.layers)]"
COUNTED = "cache.length += 0 if self.decoder.layers[0].self_attention is None else ids.shape[1]"
OTHER = "decode/other_decoder_greedy"  # case whose first decoder layer has no self-attention
# With some bugs, the results of the JAX and TensorFlow backends depend on the length to which these backends pad.
OWN = {"own_numbers": ("jax", "tf")}

HOLDS_TOKEN = "(ids != self.config.pad_id) | (n == 0)"
NORMED = "\n        if self.target_embedding_norm is not None:"
PENALIZED = "best / plan.penalties[n]"
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
    """Return edits that insert lines after the line that computes the plan of a search.

    The inserted lines can change the plan and the source mask.
    """
    more = "".join(f"    {line}\n" for line in lines)
    return instead("search_loop", PLANNED, **{port: f"{text}{more}" for port, text in PLANNED.items()})


def penalized(penalties: str) -> Edits:
    """Return edits that replace the length penalties of beam search.

    ``penalties`` is an expression that can use the array ``n`` of all lengths and the exponent ``alpha``.
    """
    return planned(
        "n, alpha = __import__('numpy').arange(len(plan.penalties)), search.length_penalty",
        f"plan = plan if search.beam_size is None else plan._replace(penalties={penalties})",
    )


def starting_with(token: str) -> Edits:
    """Return edits that replace the BOS token at the start of every search with the expression ``token``."""
    return together(
        instead("search", "(size, plan.start_id", f"(size, {token}"),
        instead("search", "(shape, plan.start_id", f"(shape, {token}"),
    )


def reordered(layers: str) -> Edits:
    """Return edits that reorder only the caches of the layers that the slice ``layers`` selects."""
    return instead("decoder", "for past in self.past:", f"for past in self.past[{layers}]:")


NGRAMS = {1: "token", 2: "bigram", 3: "trigram", 4: "4-gram"}  # maps the length of an n-gram to its name


def ruled(rules: str) -> Edits:
    """Return edits that change the search rules. ``rules`` contains keyword arguments as source code."""
    return planned("from dataclasses import replace", f"plan = plan._replace(rules=replace(plan.rules, {rules}))")


def repetition_penalty(penalty: float, log_probabilities: str) -> Edits:
    """Return edits to the reference that penalize tokens that a hypothesis already contains, including BOS.

    Args:
        penalty: Factor of the penalty. The positive scores of these tokens are divided by it, and the negative scores
            are multiplied by it.
        log_probabilities: Expression that is True if the scores are log-probabilities, and False if they are logits.
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


# These bugs serve only as candidates for the diagnosis. The mutation test doesn't inject them into ports. The beam
# searches of its cases request multiple hypotheses, but a search with a beam of size 1 can't return multiple
# hypotheses. The other bugs in this list change the results of too few sentences.
ONLY_CANDIDATES = [
    *(Bug(f"no repeated {words}s", "", ruled(f"no_repeat_ngram_size={size}")) for size, words in NGRAMS.items()),
    Bug("EOS forced at the maximum length with probability 1", "", ruled("at_limit='forced'")),
    Bug("beam of size 1", "", planned("plan = plan._replace(beam_size=1)")),
    Bug(
        "greedy search instead of beam search",
        "",
        planned(
            "from dataclasses import replace",
            "plan = plan._replace(beam_size=1, rules=replace(plan.rules, stop='first'))",
        ),
    ),
]

CATALOG = [
    *table(
        {
            LOGITS: {
                "every position encoded as the first": changed(
                    "transformer",
                    ("cache.positions[n]", "cache.positions[n * 0]"),
                    tf=("(cache.positions, n)", "(cache.positions, n * 0)"),
                    torch=("cache.positions[new]", "cache.positions[:1]"),
                ),
                "positions one too low": but(
                    changed(
                        "transformer",
                        ("cache.positions[n]", "cache.positions[n - 1]"),
                        tf=("(cache.positions, n)", "(tf.roll(cache.positions, 1, 0), n)"),
                        torch=("cache.positions[new]", "cache.positions.roll(1, 0)[new]"),
                    ),
                    **OWN,
                ),
                "past padding not masked": changed(
                    "transformer",
                    (HOLDS_TOKEN, "(ids == ids)"),
                    torch=("= ids != self.config.pad_id", "= True"),
                ),
                "BOS masked if it is padding": but(
                    changed(
                        "transformer",
                        (HOLDS_TOKEN, "(ids != self.config.pad_id)"),
                        torch=("if new.start == 0:", "if False:"),
                    ),
                    case=MARIAN,
                ),
                "source padding not masked": but(instead("decoder", "cache.cross_mask,", "None,"), **OWN),
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
                # JAX and TensorFlow aren't included because the bug would raise an error about the shape of the mask.
                "cache of a different layer": but(
                    {
                        "numpy": [  # the length of the cache stays 0 if the first layer has no self-attention
                            ("decoder", PASTS, OTHERS),
                            ("transformer", "cache.length += ids.shape[1]", COUNTED),
                        ],
                        "torch": [  # in PyTorch, the caches of all layers have the same length
                            ("decoder", PASTS, OTHERS),
                            ("decoder", "past.value, n) if", "past.value, getattr(cache, 'n', 0)) if"),
                            ("decoder", "cache.length = end", "cache.n = getattr(cache, 'n', 0) + 1"),
                        ],
                    },
                    case=OTHER,
                ),
                "last cached value used for all positions": changed(
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
                "continues after EOS": instead("search", "(tokens != plan.eos_id) & ", ""),
                "stops one token early": but(
                    instead("search", "& (n < ", "& (n + 1 < "), case="decode/paper_base_greedy"
                ),
            },
            (SCORES, GREEDY): {
                "scores tokens after EOS": instead(
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
                "cache reordered by finished hypotheses": changed(
                    "search",
                    ("token[sentence, rank], parent[sentence, rank]", "token[sentence, rank], parent[:, :beam_size]"),
                    tf=(
                        "(tf.gather(x, rank, batch_dims=1) for x in (candidates, token, parent))",
                        "(*(tf.gather(x, rank, batch_dims=1) for x in (candidates, token)), parent[:, :beam_size])",
                    ),
                ),
                "no length penalty": instead("search", PENALIZED, "best / 1.0"),
                "length penalty does not count EOS": instead("search", PENALIZED, "best / plan.penalties[n - 1]"),
                "stops at the first finished hypotheses": instead(
                    "search", "finished[:, -1] >= attainable", "finished[:, -1] > -9e9"
                ),
                "stop criterion uses the current length": instead("search", LONGEST, "longest = n"),
                "finished hypotheses continue": instead("search", "where(~ends, best", "where(ends | True, best"),
                "stops one token early": instead("search", "limits == n)", "limits == n + 1)"),
                "hypotheses outside the beam may finish": but(TWICE_THE_BEAM, case="decode/paper_base_beam"),
            }
        },
        case=BEAM,
        path="fast",
    ),
    *table(
        {
            (TOKENS, OPUS): {
                "stop criterion uses the maximum length": instead("search", LONGEST, "longest = plan.limits"),
                "pool size equals the number of returned hypotheses": instead(
                    "search", "finished[:, -1] >= attainable", "finished[:, plan.num_hypotheses - 1] >= attainable"
                ),
                "banned tokens are generated": instead("search_rules", "if rules.banned_ids:", "if False:"),
                "banned tokens keep their probability": instead("search_rules", " if rules.renormalize ", " if False "),
            },
            (TOKENS, BART): {
                "continues with a full pool": instead("search", 'plan.rules.stop == "first"', "False"),
                "forced EOS keeps its model score": instead("search_rules", SCORED_END, "scored=True"),
                "EOS forced one token early": instead("search_rules", "plan.limits == n", "plan.limits == n + 1"),
                "forced token keeps its model score": instead("search_rules", SCORED_TOKEN, "scored=True"),
                "the second token is forced": instead("search_rules", "plan.prefix[:, n - 1]", "plan.prefix[:, n - 2]"),
                "n-grams one token too short": instead(
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
                "forced token scored as certain": instead("search_rules", SCORED_TOKEN, "scored=False"),
                "forced EOS scored as certain": instead("search_rules", SCORED_END, "scored=False"),
            },
            (TOKENS, MARIAN_CPP): {
                "beam does not shrink": instead("search", "plan.rules.beam_shrinks", "False"),
            },
        },
        path="fast",
    ),
    *table(
        {
            LOGITS: {
                "positions one too low, except the first": changed(
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
                "continues after padding": instead(
                    "search", "unfinished = self.unfinished & (tokens", "unfinished = (tokens"
                ),
                "search does not mask source padding": planned("source_mask = source_mask | True"),
            },
        },
        path="fast",
    ),
    *table(
        {
            TOKENS: {
                "EOS forbidden in the first step": planned("plan = plan._replace(min_length=2)"),
                "EOS forbidden in the first two steps": planned("plan = plan._replace(min_length=3)"),
                "scores multiplied by the length penalty": penalized("1.0 / plan.penalties"),
                "length penalty with an alpha of 0.6": penalized("((5.0 + n) / 6.0) ** 0.6"),
                "length penalty with an alpha of 1": penalized("(5.0 + n) / 6.0"),
                "scores divided by the number of tokens": penalized("1.0 * n"),
                "stops when the number of finished hypotheses reaches the beam size": planned(
                    "from dataclasses import replace",
                    "plan = plan._replace(pool_size=plan.beam_size, rules=replace(plan.rules, stop='first'))",
                ),
                "beam size one too small": planned("plan = plan._replace(beam_size=max(plan.beam_size - 1, 1))"),
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
