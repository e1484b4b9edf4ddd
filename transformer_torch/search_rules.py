"""Rules that other libraries use to restrict the next tokens of a search. The paper's search has no such rules.

Axes: B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder, E
positions at which an n-gram can end.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from transformer_spec.search import SearchPlan
from transformer_spec.shapes import Float, Int


def apply_rules(
    log_probabilities: Float[Tensor, "R V"], ids: Int[Tensor, "B K capacity"], n: Any, plan: SearchPlan
) -> Float[Tensor, "R V"]:
    """Apply the search rules to the log-probabilities of the n-th tokens. Forbidden tokens get -inf.

    A forced token is allowed even if it is banned. With the paper's rules, the function returns its input unchanged.
    """
    rules, own = plan.rules, log_probabilities
    if rules.no_repeat_ngram_size > 0:
        log_probabilities = torch.where(~_repeats(ids, n, plan, log_probabilities.shape[1]), log_probabilities, -inf)
    if rules.banned_ids:
        log_probabilities = log_probabilities.index_fill(1, ids.new_tensor(rules.banned_ids), -inf)
    if plan.has_prefix:
        token = plan.prefix[:, n - 1].repeat_interleave(ids.shape[1])[:, None]  # [R, 1]
        alone = _alone(own, token, scored=rules.score_forced)
        log_probabilities = torch.where(token != plan.pad_id, alone, log_probabilities)
    if rules.at_limit != "cut":
        alone = _alone(own, plan.eos_id, scored=rules.at_limit == "scored")
        at_limit = (plan.limits == n).repeat_interleave(ids.shape[1])[:, None]
        log_probabilities = torch.where(at_limit, alone, log_probabilities)
    return log_probabilities.log_softmax(-1) if rules.renormalize else log_probabilities


def within_pool(values: Float[Tensor, "B X"], finished: Float[Tensor, "B P"]) -> Float[Tensor, "B X"]:
    """In each row, keep the first N finite values if the pool has N free entries. Replace later values with -inf."""
    return torch.where((values != -inf).cumsum(1) <= (finished == -inf).sum(1, keepdim=True), values, -inf)


def _alone(log_probabilities, token, *, scored):
    """Return log-probabilities [R, V] that allow only one token.

    If ``scored`` is False, the log-probability of this token is 0.
    """
    is_token = torch.arange(log_probabilities.shape[1], device=log_probabilities.device) == token
    return torch.where(is_token, log_probabilities if scored else torch.zeros_like(log_probabilities), -inf)


def _repeats(ids, n, plan, vocabulary):
    """Return a boolean array [R, V] that is True for tokens that would repeat an n-gram of the hypothesis."""
    size = plan.rules.no_repeat_ngram_size
    tokens = ids.reshape(-1, ids.shape[2])
    tokens = torch.concatenate([torch.full_like(tokens[:, :1], plan.start_id), tokens], 1)  # [R, capacity + 1]
    last = tokens[:, size - 1 :]  # [R, E]
    equal = (torch.arange(size - 1, tokens.shape[1], device=ids.device) < n).expand_as(last)
    for back in range(1, size):  # compare earlier tokens with the latest tokens
        equal = equal & (tokens[:, size - 1 - back : -back] == tokens[:, max(n - back, 0), None])
    count = tokens.new_zeros([len(tokens), vocabulary]).scatter_add(1, last, equal.to(tokens.dtype))
    return count > 0
