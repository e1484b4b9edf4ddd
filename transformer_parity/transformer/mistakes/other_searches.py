"""Mistakes of searches: other penalties, other ends, other padding, and caches that are reordered in part."""

from __future__ import annotations

from transformer_parity.transformer.mistakes.mistake import Edits, Mistake, changed, instead, table, together
from transformer_parity.transformer.mistakes.reported_training import PLANNED
from transformer_parity.transformer.mistakes.search import BEAM, GREEDY, LOGITS
from transformer_parity.transformer.stages.decode import SCORES, TOKENS

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
        instead("search", "[batch], plan.start_id", f"[batch], {token}"),
        instead("search", "(shape, plan.start_id", f"(shape, {token}"),
    )


def reordered(layers: str) -> Edits:
    """Return edits that reorder the cache of some layers only."""
    return instead("decoder", "for past in self.past:", f"for past in self.past[{layers}]:")


# Only hypotheses: with one hypothesis, a search finds fewer than the cases of the packages ask for.
ONLY_HYPOTHESES = [
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
                "every position but the first is one late": changed(
                    "transformer",
                    (POSITION, "cache.positions[max(n - 1, 0)]"),
                    jax=(POSITION, "cache.positions[jnp.maximum(n - 1, 0)]"),
                    tf=(POSITION, "cache.positions[tf.maximum(n - 1, 0)]"),
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
