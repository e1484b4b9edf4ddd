"""Rules that other libraries use to restrict the next tokens of a search. The paper's search has no such rules.

Axes: B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder, E
positions at which an n-gram can end.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.functional import log_softmax
from transformer_spec.search import SearchPlan
from transformer_spec.shapes import Float, Int


def apply_rules(
    log_probabilities: Float[ndarray, "R V"], ids: Int[ndarray, "B K capacity"], n: Any, plan: SearchPlan
) -> Float[ndarray, "R V"]:
    """Apply the search rules to the log-probabilities of the n-th tokens. Forbidden tokens get -inf.

    A forced token is allowed even if it is banned. With the paper's rules, the function returns its input unchanged.
    """
    rules, own = plan.rules, log_probabilities
    if rules.no_repeat_ngram_size > 0:
        log_probabilities = np.where(~_repeats(ids, n, plan, log_probabilities.shape[1]), log_probabilities, -inf)
    if rules.banned_ids:
        banned = np.isin(np.arange(log_probabilities.shape[1]), rules.banned_ids)
        log_probabilities = np.where(~banned, log_probabilities, -inf)
    if plan.has_prefix:
        token = plan.prefix[:, n - 1].repeat(ids.shape[1])[:, None]  # [R, 1]
        alone = _alone(own, token, scored=rules.score_forced)
        log_probabilities = np.where(token != plan.pad_id, alone, log_probabilities)
    if rules.at_limit != "cut":
        alone = _alone(own, plan.eos_id, scored=rules.at_limit == "scored")
        at_limit = (plan.limits == n).repeat(ids.shape[1])[:, None]
        log_probabilities = np.where(at_limit, alone, log_probabilities)
    return log_softmax(log_probabilities) if rules.renormalize else log_probabilities


def within_pool(values: Float[ndarray, "B X"], finished: Float[ndarray, "B P"]) -> Float[ndarray, "B X"]:
    """In each row, keep the first N finite values if the pool has N free entries. Replace later values with -inf."""
    return np.where((values != -inf).cumsum(1) <= (finished == -inf).sum(1, keepdims=True), values, -inf)


def _alone(log_probabilities, token, *, scored):
    """Return log-probabilities [R, V] that allow only one token.

    If ``scored`` is False, the log-probability of this token is 0.
    """
    is_token = np.arange(log_probabilities.shape[1]) == token
    return np.where(is_token, log_probabilities if scored else np.zeros_like(log_probabilities), -inf)


def _repeats(ids, n, plan, vocabulary):
    """Return a boolean array [R, V] that is True for tokens that would repeat an n-gram of the hypothesis."""
    size = plan.rules.no_repeat_ngram_size
    tokens = ids.reshape(-1, ids.shape[2])
    tokens = np.concatenate([np.full_like(tokens[:, :1], plan.start_id), tokens], 1)  # [R, capacity + 1]
    last = tokens[:, size - 1 :]  # [R, E]
    equal = np.broadcast_to(np.arange(size - 1, tokens.shape[1]) < n, last.shape)
    for back in range(1, size):  # compare earlier tokens with the latest tokens
        equal = equal & (tokens[:, size - 1 - back : -back] == tokens[:, max(n - back, 0), None])
    count = np.zeros([len(tokens), vocabulary], int)
    np.add.at(count, (np.arange(len(tokens))[:, None], last), equal)
    return count > 0
