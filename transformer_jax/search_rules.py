"""Rules that other libraries use to restrict the next tokens of a search. The paper's search has no such rules.

Axes: B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder, E
positions at which an n-gram can end.
"""

from __future__ import annotations

from math import inf
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from transformer_spec.search import SearchPlan
from transformer_spec.shapes import Float, Int


def apply_rules(
    log_probabilities: Float[Array, "R V"], ids: Int[Array, "B K capacity"], n: Any, plan: SearchPlan
) -> Float[Array, "R V"]:
    """Apply the search rules to the log-probabilities of the n-th tokens. Forbidden tokens get -inf.

    A forced token is allowed even if it is banned. With the paper's rules, the function returns its input unchanged.
    """
    rules, own = plan.rules, log_probabilities
    if rules.no_repeat_ngram_size > 0:
        log_probabilities = jnp.where(~_repeats(ids, n, plan, log_probabilities.shape[1]), log_probabilities, -inf)
    if rules.banned_ids:
        banned = jnp.isin(jnp.arange(log_probabilities.shape[1]), jnp.array(rules.banned_ids))
        log_probabilities = jnp.where(~banned, log_probabilities, -inf)
    if plan.has_prefix:
        token = plan.prefix[:, n - 1].repeat(ids.shape[1])[:, None]  # [R, 1]
        alone = _alone(own, token, scored=rules.score_forced)
        log_probabilities = jnp.where(token != plan.pad_id, alone, log_probabilities)
    if rules.at_limit != "cut":
        alone = _alone(own, plan.eos_id, scored=rules.at_limit == "scored")
        at_limit = (plan.limits == n).repeat(ids.shape[1])[:, None]
        log_probabilities = jnp.where(at_limit, alone, log_probabilities)
    return jax.nn.log_softmax(log_probabilities) if rules.renormalize else log_probabilities


def within_pool(values: Float[Array, "B X"], finished: Float[Array, "B P"]) -> Float[Array, "B X"]:
    """In each row, keep the first N finite values if the pool has N free entries. Replace later values with -inf."""
    return jnp.where((values != -inf).cumsum(1) <= (finished == -inf).sum(1, keepdims=True), values, -inf)


def _alone(log_probabilities, token, *, scored):
    """Return log-probabilities [R, V] that allow only one token.

    If ``scored`` is False, the log-probability of this token is 0.
    """
    is_token = jnp.arange(log_probabilities.shape[1]) == token
    return jnp.where(is_token, log_probabilities if scored else jnp.zeros_like(log_probabilities), -inf)


def _repeats(ids, n, plan, vocabulary):
    """Return a boolean array [R, V] that is True for tokens that would repeat an n-gram of the hypothesis."""
    size = plan.rules.no_repeat_ngram_size
    tokens = ids.reshape(-1, ids.shape[2])
    tokens = jnp.concatenate([jnp.full_like(tokens[:, :1], plan.start_id), tokens], 1)  # [R, capacity + 1]
    last = tokens[:, size - 1 :]  # [R, E]
    equal = jnp.broadcast_to(jnp.arange(size - 1, tokens.shape[1]) < n, last.shape)
    for back in range(1, size):  # compare earlier tokens with the latest tokens
        equal = equal & (tokens[:, size - 1 - back : -back] == tokens[:, jnp.maximum(n - back, 0), None])
    rows = jnp.arange(len(tokens))[:, None]
    count = jnp.zeros([len(tokens), vocabulary], jnp.int32).at[rows, last].add(equal.astype(jnp.int32))
    return count > 0
