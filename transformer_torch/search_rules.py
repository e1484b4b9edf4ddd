"""What other people's searches let a hypothesis say next, where it is not what the paper's does.

B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder, E places where
an n-gram can end.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from reference_numpy.search_plan import SearchPlan
from reference_numpy.shapes import Float, Int


def apply_rules(
    log_probabilities: Float[Tensor, "R V"], ids: Int[Tensor, "B K capacity"], n: Any, plan: SearchPlan
) -> Float[Tensor, "R V"]:
    """Return the log-probability of each n-th token as the rules of a search have it, with -inf for what they forbid.

    What is forced is said even if it is banned. The paper's rules cost nothing.
    """
    rules, own = plan.rules, log_probabilities
    if rules.no_repeat_ngram_size > 0:
        log_probabilities = torch.where(~_repeats(ids, n, plan, log_probabilities.shape[1]), log_probabilities, -inf)
    if rules.banned_ids:
        log_probabilities = log_probabilities.index_fill(1, ids.new_tensor(rules.banned_ids), -inf)
    for place, token in enumerate(rules.forced_ids, 1):
        alone = _alone(own, token, scored=rules.score_forced)
        log_probabilities = alone if n == place else log_probabilities
    if rules.at_limit != "cut":
        alone = _alone(own, plan.eos_id, scored=rules.at_limit == "scored")
        at_limit = (plan.limits == n).repeat_interleave(ids.shape[1])[:, None]
        log_probabilities = torch.where(at_limit, alone, log_probabilities)
    return log_probabilities.log_softmax(-1) if rules.renormalize else log_probabilities


def within_pool(values: Float[Tensor, "B X"], finished: Float[Tensor, "B P"]) -> Float[Tensor, "B X"]:
    """Return as many of the first values as there are places left in the pool, and -inf for those behind."""
    return torch.where((values != -inf).cumsum(1) <= (finished == -inf).sum(1, keepdim=True), values, -inf)


def _alone(log_probabilities, token, *, scored):
    """Return what it means that only one token may be said, with its own log-probability or for certain [R, V]."""
    is_token = torch.arange(log_probabilities.shape[1], device=log_probabilities.device) == token
    return torch.where(is_token, log_probabilities if scored else torch.zeros_like(log_probabilities), -inf)


def _repeats(ids, n, plan, vocabulary):
    """Return whether each token would end an n-gram that the hypothesis has said before [R, V]."""
    size = plan.rules.no_repeat_ngram_size
    said = ids.reshape(-1, ids.shape[2])
    said = torch.concatenate([torch.full_like(said[:, :1], plan.start_id), said], 1)  # [R, capacity + 1]
    last = said[:, size - 1 :]  # [R, E]
    is_said = (torch.arange(size - 1, said.shape[1], device=ids.device) < n).expand_as(last)
    for back in range(1, size):  # the tokens before it are those that were said last
        is_said = is_said & (said[:, size - 1 - back : -back] == said[:, max(n - back, 0), None])
    count = said.new_zeros([len(said), vocabulary]).scatter_add(1, last, is_said.to(said.dtype))
    return count > 0
