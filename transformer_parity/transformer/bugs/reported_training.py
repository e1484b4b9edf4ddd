"""Training and search bugs that users of published ports have reported (see docs/reported-bugs.md)."""

from __future__ import annotations

from transformer_parity.transformer.bugs.bug import (
    FOUR,
    Change,
    Edits,
    Table,
    but,
    changed,
    instead,
    table,
    together,
)
from transformer_parity.transformer.bugs.optimizer import DIFFERENTIATED, MICRO_BATCH, adam, in_adam, rate
from transformer_parity.transformer.bugs.search import BEAM, GREEDY, LOGITS, PLANNED, TWICE_THE_BEAM, ruled
from transformer_parity.transformer.bugs.training import LOSS, ROW, SUM, TABLE, WEIGHT, by_hand, in_training
from transformer_parity.transformer.stages.decode import TOKENS

COUNTED = {"torch": "losses.masked_fill(~counted, 0.0)", "jax": "jnp.where(counted, losses, 0.0)"}
SMOOTHED = "counted, losses, -smoothing / classes * spread)"
STOP = {"jax": "__import__('jax').lax.stop_gradient", "tf": "tf.stop_gradient"}
ONE_MORE = """\
    if search.beam_size is not None:
        penalties = ((6.0 + __import__("numpy").arange(len(plan.penalties))) / 6.0) ** search.length_penalty
        plan = plan._replace(penalties=penalties)
"""
SELF_MASK = "self_mask = cache.self_mask[..., :end]"


def where_none_has_ended(within: str) -> Edits:
    """Return edits after which beam search keeps truncated hypotheses only if no hypothesis ends with EOS.

    A hypothesis is truncated if it reaches the maximum length without EOS.

    Args:
        within: Index expression for an array [B, 2K] with one column per continuation. The expression selects the
            continuations that may end with EOS.
    """
    comment = "# 2. If any of the best K extensions end, add them to the pool, which keeps the best hypotheses.\n"
    kept = "(self.finished > -9e9).any(1) | said.any(1)"
    lines = (
        "said_anywhere = token == plan.eos_id",
        f"said = said_anywhere{within}",
        "none_has = ~({})[:, None]",
        comment,
    )
    ended = {**dict.fromkeys(FOUR, kept), "tf": "tf.reduce_any(self.finished > -9e9, 1) | tf.reduce_any(said, 1)"}
    return together(
        instead("search", comment, **{port: f"\n{8 * ' '}".join(lines).format(ended[port]) for port in FOUR}),
        instead("search", "where(ends, best", "where(ends & (said_anywhere | none_has), best"),
    )


def no_gradient_of(rows: dict[str, str]) -> Edits:
    """Return edits that stop the gradient of the padding token's row in the embedding matrix.

    Args:
        rows: For each framework, an expression that looks up the embeddings and stops the gradient of this row.
    """
    return together(
        instead("embedding", "self.multiplier = ", "self.pad_id = config.pad_id\n        self.multiplier = "),
        instead("embedding", {"numpy": "self.table[ids]", **ROW}, **{"numpy": "self.table[ids]", **rows}),
    )


def uncorrected(indent: int) -> Change:
    """Return a change that removes the bias corrections of both moments."""
    lines = "m / correction1\n{0}v_hat = v / correction2", "m\n{0}v_hat = v"
    old, new = (text.format(" " * indent) for text in lines)
    return old, new


ENTRIES: dict[str, Table] = {
    "gradient": {
        (f"of {TABLE}", "gradients/starts_with_padding"): {
            # This bug occurs if a port sets padding_idx although the padding token also serves as BOS, as in Marian.
            "no gradient for the padding row": by_hand(
                no_gradient_of(
                    {
                        "torch": "F.embedding(ids, self.weight, padding_idx=self.pad_id)",
                        "jax": f"jnp.where((ids == self.pad_id)[..., None], {STOP['jax']}({ROW['jax']}), {ROW['jax']})",
                        "tf": f"tf.where((ids == self.pad_id)[..., None], {STOP['tf']}({ROW['tf']}), {ROW['tf']})",
                    }
                ),
                ("self.multiplier * dvectors", "self.multiplier * (ids != self.pad_id)[..., None] * dvectors"),
                module="embedding",
            )
        }
    },
    "loss": {
        (LOSS, "steps"): {
            "smoothing loss includes padding positions": by_hand(
                in_training(
                    (COUNTED["torch"], f"torch.where({SMOOTHED}"),
                    (COUNTED["jax"], f"jnp.where({SMOOTHED}"),
                    ("tf.where(counted, losses, 0.0)", f"tf.where({SMOOTHED}"),
                    ("np.where(counted, losses, 0.0)", f"np.where({SMOOTHED}"),
                ),
                (
                    "masked_softmax(logits) - target, 0.0)",
                    "masked_softmax(logits) - target, smoothing * masked_softmax(logits) - share)",
                ),
                module="training",
            ),
            "divided by the number of sentences": in_training(
                ("(batch[2] != config.pad_id)", "(batch[2] != config.pad_id).any(1)"),
                (SUM["jax"], SUM["jax"].replace("counted.sum()", "counted.any(1).sum()")),
                (SUM["tf"], SUM["tf"].replace("nonzero(counted", "nonzero(tf.reduce_any(counted, 1)")),
                ("counted.sum()", "counted.any(1).sum()"),
            ),
        }
    },
    "schedule": {
        (WEIGHT, "steps"): {
            "no warm-up in the first step": rate(
                "settings.learning_rate_factor * (config.d_model * settings.warmup_steps) ** -0.5"
                " if (n == 1) else settings.learning_rate(n, config.d_model)"
            ),
            "steps counted from 0": rate("0.0 if (n == 1) else settings.learning_rate(n - 1, config.d_model)"),
        }
    },
    "Adam": {
        (WEIGHT, "steps"): {
            "neither moment corrected": adam(uncorrected(12), torch=uncorrected(16)),
            "decoupled weight decay left on": in_adam(
                numpy=(
                    "theta -= learning_rate *",
                    "theta *= 1.0 - 0.01 * learning_rate\n            theta -= learning_rate *",
                ),
                torch=("Adam(torch.optim.Adam)", "Adam(torch.optim.AdamW)"),
                jax=("= theta - learning_rate *", "= theta * (1.0 - 0.01 * learning_rate) - learning_rate *"),
                tf=(
                    "theta.assign_sub(learning_rate *",
                    "theta.assign(theta * (1.0 - 0.01 * learning_rate))\n            theta.assign_sub(learning_rate *",
                ),
            ),
        }
    },
    "accumulation": {
        (LOSS, "steps/sliced"): {
            "sum of the micro-batch means": in_training(
                (
                    MICRO_BATCH,
                    "total, count = self._loss(self.shard.module, part, config)\n            loss = total / count\n",
                ),
                (
                    "return jax.tree.map(jnp.add, sums, (total, tokens, gradient)), None",
                    "mean, of_mean = jax.tree.map(lambda x: x / tokens, (total, gradient))\n"
                    "        return jax.tree.map(jnp.add, sums, (mean, 0, of_mean)), None",
                ),
                (
                    DIFFERENTIATED,
                    "count = tf.cast(tokens, total.dtype)\n"
                    f"            total, _, of_sum = {DIFFERENTIATED.removeprefix('return ')}\n"
                    "            return total / count, tf.constant(0), {name: g / count for name, g in of_sum.items()}",
                ),
                (
                    "total, tokens = total + part_total, tokens + part_tokens",
                    "count = max(int(part_tokens), 1)\n"
                    "            of_parameters = {name: array / count for name, array in of_parameters.items()}\n"
                    "            total = total + part_total / count",
                ),
            )
        }
    },
}
CATALOG = {part: table(entries) for part, entries in ENTRIES.items()}

SEARCH = [
    *table(
        {
            LOGITS: {
                # A cached step has one query. A causal mask that is computed for one row allows only the first key.
                "only the first position attended to": changed(
                    "decoder",
                    numpy=(SELF_MASK, f"{SELF_MASK} & (np.arange(end) == 0)"),
                    torch=("cache.self_mask[..., :end]", "cache.self_mask[..., :end] & (torch.arange(end) == 0)"),
                    jax=(
                        "layer(x, memory, mask,",
                        "layer(x, memory, mask & (jnp.arange(mask.shape[3]) == 0),",
                    ),
                    tf=(
                        "layer(x, memory, mask,",
                        "layer(x, memory, mask & (tf.range(tf.shape(mask)[3]) == 0),",
                    ),
                )
            }
        },
        case=GREEDY,
        path="cached",
    ),
    *table(
        {
            TOKENS: {
                "padding may be generated": changed(
                    "search",
                    ("(token == plan.pad_id) | ((n < plan.min_length)", "((n < plan.min_length)"),
                    numpy=("    log_probabilities[:, plan.pad_id] = -inf\n", ""),
                    torch=("    log_probabilities[:, plan.pad_id] = -inf\n", ""),
                ),
                "starts with EOS": but(
                    together(
                        instead("search", "(size, plan.start_id", "(size, plan.eos_id"),
                        instead("search", "(shape, plan.start_id", "(shape, plan.eos_id"),
                    ),
                    case=GREEDY,
                ),
                "all hypotheses start identical": changed(
                    "search",
                    ("arange(plan.beam_size) == 0", "arange(plan.beam_size) >= 0"),
                    torch=("device=plan.limits.device) == 0", "device=plan.limits.device) >= 0"),
                    tf=("tf.range(plan.beam_size) == 0", "tf.range(plan.beam_size) >= 0"),
                ),
                "length penalty counts BOS": instead(
                    "search_loop", PLANNED, **{port: f"{planned}{ONE_MORE}" for port, planned in PLANNED.items()}
                ),
                "length penalty n^alpha": instead(
                    "search", "length_penalty_kind=length_penalty_kind", 'length_penalty_kind="power"'
                ),
                # tensor2tensor accepts truncated hypotheses only under this condition.
                "truncated hypotheses only returned if none has finished": where_none_has_ended("[:, :beam_size]"),
                "tensor2tensor's rules: EOS within twice the beam, truncated hypotheses if none has finished": together(
                    where_none_has_ended(""), TWICE_THE_BEAM
                ),
                "EOS forced at the maximum length": ruled("at_limit='scored'"),
            }
        },
        case=BEAM,
        path="fast",
    ),
]
