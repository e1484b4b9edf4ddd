"""Known mistakes of decoding, as data: what each changes in a port, and where it must show.

A mistake in the cache shows in the logits of positions that are decoded one after another. One in the search leaves
them alone, and shows in the tokens or in the scores.
"""

from __future__ import annotations

from dataclasses import replace

from transformer_parity.cases.case import DECODE
from transformer_parity.cases.standard import standard_cases
from transformer_parity.compare.outputs import SCORES, TOKENS
from transformer_parity.mistakes.mistake import Edits, Mistake, instead, together

LOGITS = "logits"


CASES = {case.name: case for case in standard_cases() if case.stage == DECODE}


GREEDY, BEAM = "decode/ends_apart_greedy", "decode/ends_apart_beam"
MARIAN = "decode/marian_greedy"  # starts with padding


def cached(name: str, edits: Edits, case: str = GREEDY, at: str = LOGITS) -> Mistake:
    """Return a mistake in the cache."""
    return Mistake(name, at, edits, case=case, path="cached" if at == LOGITS else "fast")


def own(name: str, edits: Edits) -> Mistake:
    """Return a mistake in the cache whose numbers depend on the lengths to which JAX and TensorFlow pad."""
    return replace(cached(name, edits), own_numbers=("jax", "tf"))


def greedy(name: str, at: str, edits: Edits) -> Mistake:
    """Return a mistake in greedy search."""
    return Mistake(name, at, edits, case=GREEDY, path="fast")


def beam(name: str, at: str, edits: Edits) -> Mistake:
    """Return a mistake in beam search."""
    return Mistake(name, at, edits, case=BEAM, path="fast")


HOLDS_TOKEN = "(target_ids != self.config.pad_id) | (n == 0)"
REORDERED = {
    "numpy": "steps.reorder((sentence * beam_size + parent[sentence, rank]).reshape(-1))",
    "torch": "cache.reorder((sentence * beam_size + parent[sentence, rank]).flatten())",
    "jax": "cache.reorder((sentence * beam_size + parent[sentence, rank]).reshape(-1))",
    "tf": "cache.reorder(tf.reshape(tf.range(batch)[:, None] * beam_size + parent, [-1]))",
}
NONE = {"numpy": "-np.inf", "torch": "-torch.inf", "jax": "-jnp.inf", "tf": "none"}
PENALISED = "best / penalties[n]"

TWICE_THE_BEAM = together(
    instead(
        "search",
        {
            "numpy": "-np.inf)[:, :beam_size]",
            "torch": "-torch.inf)[:, :beam_size]",
            "jax": "-jnp.inf)[:, :beam_size]",
            "tf": "none)[:, :beam_size]",
        },
        **{port: f"{none})" for port, none in NONE.items()},
    ),
    instead("search", "candidates[:, :beam_size]]", "candidates]"),
)

CATALOGUE = [
    cached("every position is the first", instead("transformer", "cache.positions[n]", "cache.positions[n * 0]")),
    own("every position is one late", instead("transformer", "cache.positions[n]", "cache.positions[n - 1]")),
    cached("padding in the past is seen", instead("transformer", HOLDS_TOKEN, "(target_ids == target_ids)")),
    cached(
        "a start symbol that is padding is hidden",
        instead("transformer", HOLDS_TOKEN, "(target_ids != self.config.pad_id)"),
        case=MARIAN,
    ),
    own("padding in the source is seen", instead("decoder", "cache.cross_mask,", "None,")),
    cached(
        "all layers attend to the first layer's memory",
        instead("decoder", "cache.memory, cache.past,", "cache.memory[:1] * len(cache.memory), cache.past,"),
    ),
    cached(
        "the last value stands for all",
        instead(
            "attention",
            {
                "numpy": "self.key[:, :, new], self.value[:, :, new] = key, value",
                "torch": "self.key[:, :, new], self.value[:, :, new] = key, value",
                "jax": "self.value = jax.lax.dynamic_update_slice_in_dim(self.value, value, self.length, axis=2)",
                "tf": "self.value = keras.ops.slice_update(self.value, start, value)",
            },
            numpy="self.key[:, :, new], self.value = key, value + 0 * self.value",
            torch="self.key[:, :, new], self.value = key, value + 0 * self.value",
            jax="self.value = value + 0 * self.value",
            tf="self.value = value + 0 * self.value",
        ),
    ),
    cached(
        "hypotheses attend to the memory of other sentences",
        instead(
            "attention",
            {
                "numpy": "query.reshape(len(memory.key), -1, shape[-1])",
                "torch": "query.reshape(len(memory.key), -1, shape[-1])",
                "jax": "query.reshape(len(memory.key), -1, shape[-1])",
                "tf": "tf.reshape(query, [keras.ops.shape(memory.key)[0], -1, query.shape[2]])",
            },
            numpy="query.reshape(-1, len(memory.key), shape[-1]).swapaxes(0, 1)",
            torch="query.reshape(-1, len(memory.key), shape[-1]).swapaxes(0, 1)",
            jax="query.reshape(-1, len(memory.key), shape[-1]).swapaxes(0, 1)",
            tf="tf.transpose(tf.reshape(query, [-1, keras.ops.shape(memory.key)[0], query.shape[2]]), [1, 0, 2])",
        ),
        case=BEAM,
        at=TOKENS,
    ),
    greedy(
        "goes on after the end symbol",
        TOKENS,
        instead("search", "(tokens != config.eos_id) & ", ""),
    ),
    greedy("stops a token early", TOKENS, instead("search", "& (n < ", "& (n + 1 < ")),
    greedy(
        "scores what comes after the end",
        SCORES,
        instead(
            "search",
            {
                "numpy": "scores[unfinished, 0] += log_probabilities[unfinished, tokens[unfinished]]",
                "torch": "best.where(unfinished, 0.0)",
                "jax": "jnp.where(unfinished[:, None], scores + best, scores)",
                "tf": "tf.where(state.unfinished[:, None], state.scores + best, state.scores)",
            },
            numpy="scores[:, 0] += log_probabilities.max(-1)",
            torch="best",
            jax="scores + best",
            tf="state.scores + best",
        ),
    ),
    greedy(
        "scores are logits",
        SCORES,
        instead(
            "search",
            {
                "numpy": "log_softmax(logits)",
                "torch": "logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))",
                "jax": "jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))",
                "tf": "tf.nn.log_softmax(tf.cast(logits, _wide(logits.dtype)))",
            },
            numpy="logits.copy()",
            torch="logits.clone()",
            jax="logits",
            tf="logits",
        ),
    ),
    beam("the cache is not reordered", TOKENS, instead("search", REORDERED, "pass")),
    beam(
        "the cache follows hypotheses that have ended",
        TOKENS,
        instead(
            "search",
            {
                "numpy": "parent[sentence, rank])",
                "torch": "parent[sentence, rank])",
                "jax": "parent[sentence, rank])",
                "tf": "(tf.gather(x, rank, batch_dims=1) for x in (candidates, token, parent))",
            },
            numpy="parent[:, :beam_size])",
            torch="parent[:, :beam_size])",
            jax="parent[:, :beam_size])",
            tf="(*(tf.gather(x, rank, batch_dims=1) for x in (candidates, token)), parent[:, :beam_size])",
        ),
    ),
    beam("no length penalty", TOKENS, instead("search", PENALISED, "best / 1.0")),
    beam("the end symbol has no length", TOKENS, instead("search", PENALISED, "best / penalties[n - 1]")),
    beam(
        "stops at the first hypotheses that end",
        TOKENS,
        instead("search", "finished[:, -1] >= attainable", "finished[:, -1] > -9e9"),
    ),
    beam(
        "stops by the current length",
        TOKENS,
        instead(
            "search",
            {
                "numpy": "penalties[plan.limits]",
                "torch": "penalties[limits]",
                "jax": "penalties[limits]",
                "tf": "tf.gather(penalties, limits)",
            },
            "penalties[n]",
        ),
    ),
    beam(
        "ended hypotheses go on",
        TOKENS,
        instead(
            "search",
            {
                "numpy": "np.where(ends, -np.inf, best)",
                "torch": "best.where(~ends, -torch.inf)",
                "jax": "jnp.where(ends, -jnp.inf, best)",
                "tf": "tf.where(ends, none, best)",
            },
            "best",
        ),
    ),
    beam("stops a token early", TOKENS, instead("search", "limits == n)", "limits == n + 1)")),
    beam(
        "hypotheses outside the beam may end",
        TOKENS,
        TWICE_THE_BEAM,
    ),
]
