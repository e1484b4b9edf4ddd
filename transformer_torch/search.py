"""Search (Vaswani et al., 2017, section 6.1): greedy and beam, one token after another.

B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_spec.checks import check_integer
from transformer_spec.search import OnStep, Search, SearchPlan, SearchResult
from transformer_spec.search_rules import SearchRules
from transformer_spec.shapes import Bool, Float, Int
from transformer_torch.fast import top_by_blocks
from transformer_torch.search_loop import run_search
from transformer_torch.search_rules import apply_rules, within_pool
from transformer_torch.transformer import Transformer, transformer_of


def greedy_search(
    model: Transformer,
    source_ids: Any,
    max_length: int | None = None,
    min_length: int = 1,
    start_id: int | None = None,
    source_mask: Any = None,
    on_step: OnStep | None = None,
    *,
    rules: SearchRules | None = None,
) -> SearchResult:
    """Append the likeliest next token to each sentence until that is the EOS token.

    Padding is never generated. If two tokens are equally likely, the one with the lower id is used. The result of a
    sentence doesn't depend on the rest of the batch.

    Args:
        model: The model, or a module around it. Code that ``torch.compile(model)`` compiled is used.
        source_ids: Source sentences [B, S], padded with ``config.pad_id``.
        max_length: Maximum number of tokens, including EOS. None is each source's length + 50.
        min_length: Minimum number of tokens, including EOS.
        start_id: First token that the decoder reads. None is ``config.bos_id``.
        source_mask: True if a source position holds a token [B, S]. None derives it from the ids.
        on_step: Called after each step with the tokens so far [B, 1, n], padded after EOS.
        rules: Search rules of other programs. None is the paper's.

    Returns:
        One hypothesis for each sentence, with its log-probability as the score.

    Raises:
        TypeError: If the model contains no Transformer, ids or lengths are not integers, or the mask is not boolean.
        ValueError: If ids or mask have the wrong shape, ids are outside the vocabulary, lengths contradict each other
            or the model's positions, or the model computes NaN.
    """
    search = Search(
        max_length=max_length,
        min_length=min_length,
        start_id=start_id,
        rules=SearchRules() if rules is None else rules,
    )
    return run_search(Greedy, model, source_ids, source_mask, search, on_step)


def beam_search(
    model: Transformer,
    source_ids: Any,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    min_length: int = 1,
    num_hypotheses: int = 1,
    length_penalty_kind: str = "gnmt",
    start_id: int | None = None,
    source_mask: Any = None,
    on_step: OnStep | None = None,
    *,
    rules: SearchRules | None = None,
) -> SearchResult:
    """Extend the likeliest unfinished hypotheses by every token in each step, and return the best finished ones.

    Each step considers the ``beam_size`` likeliest extensions. Those that end, by EOS or at the maximum length, are
    finished, and ranked by log-probability over length penalty. The ``beam_size`` likeliest that don't end are extended
    in the next step. The search of a sentence stops as soon as no unfinished hypothesis can become one of the best
    ``num_hypotheses``. Ties go to the extension of the better hypothesis, then to the lower id; among finished
    hypotheses, to the earlier one.

    Args:
        model: The model, or a module around it, as in ``greedy_search``.
        source_ids: Source sentences [B, S], padded with ``config.pad_id``.
        beam_size: Number of unfinished hypotheses per sentence; may exceed the vocabulary.
        length_penalty: Exponent of the length penalty; 0 ranks by log-probability, which favors short hypotheses.
        max_length: Maximum number of tokens, including EOS. None is each source's length + 50.
        min_length: Minimum number of tokens, including EOS.
        num_hypotheses: Number of hypotheses to return per sentence, at most ``beam_size``.
        length_penalty_kind: ``gnmt``, ((5 + n) / 6)^alpha as in the paper, or ``power``, n^alpha.
        start_id: First token that the decoder reads. None is ``config.bos_id``.
        source_mask: True if a source position holds a token [B, S]. None derives it from the ids.
        on_step: Called after each step with the unfinished hypotheses [B, K, n], best first, then padding.
        rules: Search rules of other programs. None is the paper's.

    Returns:
        The best hypotheses of each sentence, best first, and their scores.

    Raises:
        TypeError: As in ``greedy_search``.
        ValueError: As in ``greedy_search``, or if a size or penalty is out of range.
    """
    search = Search(
        beam_size=check_integer("beam_size", beam_size, minimum=1),
        length_penalty=length_penalty,
        max_length=max_length,
        num_hypotheses=num_hypotheses,
        length_penalty_kind=length_penalty_kind,
        min_length=min_length,
        start_id=start_id,
        rules=SearchRules() if rules is None else rules,
    )
    return run_search(FastBeam if transformer_of(model).fast else Beam, model, source_ids, source_mask, search, on_step)


def top(values: Float[Tensor, "B N"], count: int) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the largest values of each row and their indices. Of equal values, the first comes first."""
    values = torch.where(values.isnan(), inf, values)  # NaN comes first, so that it is noticed
    best, index = values.sort(dim=-1, descending=True, stable=True)
    return best[:, :count], index[:, :count]


class Greedy(NamedTuple):
    """How far greedy search has come."""

    tokens: Int[Tensor, " B"]  # what is read next
    ids: Int[Tensor, "B 1 capacity"]
    scores: Float[Tensor, "B 1"]
    unfinished: Bool[Tensor, " B"]

    @classmethod
    def start(cls, plan: SearchPlan) -> Greedy:
        """Return the state before the first step: no hypothesis has a token."""
        batch = len(plan.limits)
        return cls(
            tokens=plan.limits.new_full([batch], plan.start_id),
            ids=plan.limits.new_full([batch, 1, plan.capacity], plan.pad_id),
            scores=plan.penalties.new_zeros([batch, 1]),
            unfinished=plan.limits > 0,
        )

    def step(self, logits: Float[Tensor, "B V"], n: Any, plan: SearchPlan) -> tuple[Greedy, None]:
        """Return the state after the n-th token of each unfinished sentence, given the logits; no row moves."""
        log_probabilities = _next_log_probabilities(logits, self.ids, n, plan)  # [B, V]
        best, index = log_probabilities.max(-1, keepdim=True)  # of equal ones, the first
        tokens = torch.where(self.unfinished, index[:, 0], plan.pad_id)
        ids = self.ids
        ids[:, 0, n - 1] = tokens
        scores = self.scores + torch.where(self.unfinished[:, None], best, 0.0)
        unfinished = self.unfinished & (tokens != plan.eos_id) & (n < plan.limits)
        return self._replace(tokens=tokens, ids=ids, scores=scores, unfinished=unfinished), None

    def goes_on(self) -> Any:
        """Whether any sentence is unfinished."""
        return self.unfinished.any()

    def best(self) -> tuple[Int[Tensor, "B 1 capacity"], Float[Tensor, "B 1"]]:
        """Return the one hypothesis of each sentence, and its score."""
        return self.ids, self.scores


class Beam(NamedTuple):
    """How far beam search has come."""

    tokens: Int[Tensor, "B K"]  # what is read next
    ids: Int[Tensor, "B K capacity"]  # padding where no hypothesis is
    alive: Float[Tensor, "B K"]  # log-probabilities; -inf is no hypothesis
    finished_ids: Int[Tensor, "B P capacity"]
    finished: Float[Tensor, "B P"]  # scores, best first

    top = staticmethod(top)  # type: ignore[misc]  # no field

    @classmethod
    def start(cls, plan: SearchPlan) -> Beam:
        """Return the state before the first step: there is one hypothesis of each sentence, the empty one."""
        shape, kept = [len(plan.limits), plan.beam_size], [len(plan.limits), plan.pool_size]
        is_empty_one = (plan.limits > 0)[:, None] & (torch.arange(plan.beam_size, device=plan.limits.device) == 0)
        return cls(  # type: ignore[call-arg]
            tokens=plan.limits.new_full(shape, plan.start_id),
            ids=plan.limits.new_full([*shape, plan.capacity], plan.pad_id),
            alive=torch.where(is_empty_one, plan.penalties.new_zeros(shape), -inf),
            finished_ids=plan.limits.new_full([*kept, plan.capacity], plan.pad_id),
            finished=plan.penalties.new_full(kept, -inf),
        )

    def step(self, logits: Float[Tensor, "R V"], n: Any, plan: SearchPlan) -> tuple[Beam, Int[Tensor, " R"]]:
        """Return the state after the n-th token of each hypothesis, given the logits, and the row each goes on from."""
        (batch, beam_size), pool_size, vocabulary = self.alive.shape, self.finished.shape[1], logits.shape[1]
        sentence = torch.arange(batch, device=logits.device)[:, None]
        # 1. Let each hypothesis go on in every way; twice the beam is enough, since each can end in one way only.
        log_probabilities = _next_log_probabilities(logits, self.ids, n, plan)  # [R, V]
        totals = self.alive[:, :, None] + log_probabilities.reshape(batch, beam_size, vocabulary)  # [B, K, V]
        best, index = self.top(totals.reshape(batch, -1), 2 * beam_size)  # [B, 2K]
        if plan.rules.beam_shrinks:
            best = within_pool(best, self.finished)
        parent, token = index // vocabulary, index % vocabulary
        candidates = self.ids[sentence, parent]  # [B, 2K, capacity]
        candidates[:, :, n - 1] = token
        ends = (token == plan.eos_id) | (plan.limits == n)[:, None]
        # 2. Of those within the beam that end, keep the best.
        ended = torch.where(ends, best / plan.penalties[n], -inf)[:, :beam_size]
        if plan.rules.pool == "first":
            ended = within_pool(ended, self.finished)
        finished, rank = self.top(torch.concatenate([self.finished, ended], 1), pool_size)  # [B, P]
        finished_ids = torch.concatenate([self.finished_ids, candidates[:, :beam_size]], 1)[sentence, rank]
        # 3. Go on with the best that do not end, unless none of them can still be among the best.
        alive, rank = self.top(torch.where(~ends, best, -inf), beam_size)  # [B, K]
        longest = n if plan.rules.stop == "current" else plan.limits
        attainable = alive[:, 0] / plan.penalties[longest]  # if all its further tokens were certain
        is_over = finished[:, -1] >= attainable
        if plan.rules.stop == "first":
            is_over = finished[:, -1] != -inf
        alive = torch.where(~is_over[:, None], alive, -inf)
        ids = torch.where((alive != -inf)[:, :, None], candidates[sentence, rank], plan.pad_id)
        tokens, parent = token[sentence, rank], parent[sentence, rank]
        rows = (sentence * beam_size + parent).reshape(-1)
        state = self._replace(tokens=tokens, ids=ids, alive=alive, finished_ids=finished_ids, finished=finished)
        return state, rows

    def goes_on(self) -> Any:
        """Whether any hypothesis is unfinished."""
        return (self.alive != -inf).any()

    def best(self) -> tuple[Int[Tensor, "B P capacity"], Float[Tensor, "B P"]]:
        """Return the best finished hypotheses of each sentence, best first, and their scores."""
        return self.finished_ids, self.finished


class FastBeam(Beam):
    """Beam search with a faster choice of the best continuations."""

    top = staticmethod(top_by_blocks)


def _next_log_probabilities(logits, ids, n, plan):
    """Return the log-probability of each next token [R, V], with -inf for tokens that are not allowed."""
    log_probabilities = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
    log_probabilities[:, plan.pad_id] = -inf
    if n < plan.min_length:
        log_probabilities[:, plan.eos_id] = -inf
    return apply_rules(log_probabilities, ids, n, plan)
