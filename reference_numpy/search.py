"""Search (Vaswani et al., 2017, section 6.1): greedy search, beam search, samples, and scores of given translations.

B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from reference_numpy import fast
from reference_numpy.functional import log_softmax, masked_softmax
from reference_numpy.search_loop import run_search
from reference_numpy.search_rules import apply_rules, within_pool
from reference_numpy.transformer import Transformer
from transformer_spec.checks import check_integer, check_translations, to_array
from transformer_spec.search import OnStep, Scores, Search, SearchPlan, SearchResult, check_start
from transformer_spec.search_rules import SearchRules
from transformer_spec.shapes import Bool, Float, Int


def greedy_search(
    model: Transformer,
    source_ids: Any,
    max_length: int | None = None,
    min_length: int = 1,
    start_id: int | None = None,
    source_mask: Any = None,
    on_step: OnStep | None = None,
    *,
    prefix_ids: Any = None,
    rules: SearchRules | None = None,
    use_cache: bool = True,
) -> SearchResult:
    """Take the likeliest next token, again and again, until it is the end symbol.

    Padding is never generated. Of equally likely tokens, the one with the lower id is taken. The result of a sentence
    does not depend on the other sentences of the batch.

    Args:
        model: The model.
        source_ids: The source sentences [B, S], padded with ``config.pad_id``.
        max_length: The most tokens to generate, the end symbol included. None is each source's length + 50.
        min_length: The fewest tokens to generate, the end symbol included.
        start_id: What the decoder reads first. None is ``config.bos_id``.
        source_mask: True where a source position holds a token [B, S]. None derives it from the ids.
        on_step: Called after each step with the tokens so far [B, 1, n], padded behind the end symbol.
        prefix_ids: Tokens that the hypotheses of each sentence begin with [B, P], without the start symbol, padded with
            ``config.pad_id``. They add 0 to the score, or their log-probability if ``rules.score_forced`` is set.
        rules: How other programs search, where it is not what is described here. None is the paper's.
        use_cache: False decodes the whole prefix again for each token: the same result, and many times the work.

    Returns:
        One hypothesis for each sentence; its score is its log-probability.

    Raises:
        TypeError: Ids or lengths that are not integers, or a mask that is not boolean.
        ValueError: Ids or mask of the wrong shape, ids outside the vocabulary, lengths that contradict each other or
            the model's positions, or a model that computes NaN.
    """
    search = Search(
        max_length=max_length,
        min_length=min_length,
        start_id=start_id,
        rules=SearchRules() if rules is None else rules,
        prefix_ids=prefix_ids,
    )
    return run_search(Greedy, model, source_ids, source_mask, search, on_step, use_cache=use_cache)


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
    prefix_ids: Any = None,
    rules: SearchRules | None = None,
    use_cache: bool = True,
) -> SearchResult:
    """Keep the likeliest unfinished hypotheses, let each go on in every way, and return the best that ended.

    In each step, the ``beam_size`` likeliest continuations are looked at. Those that end, by the end symbol or at the
    maximum length, are finished, and ranked by log-probability over length penalty. The ``beam_size`` likeliest that do
    not end go on. The search of a sentence stops as soon as no unfinished hypothesis can become one of the best
    ``num_hypotheses``. Of equally likely continuations, the one of the better hypothesis comes first, then the one with
    the lower id; of equally good finished hypotheses, the one found first.

    Padding is never generated. A beam may be wider than the vocabulary: then it fills up within a few steps. The result
    of a sentence does not depend on the other sentences of the batch.

    Args:
        model: The model.
        source_ids: The source sentences [B, S], padded with ``config.pad_id``.
        beam_size: How many unfinished hypotheses of each sentence are kept.
        length_penalty: The exponent of the length penalty; 0 ranks by log-probability, which favours short hypotheses.
        max_length: The most tokens of a hypothesis, the end symbol included. None is the source length + 50.
        min_length: The fewest tokens of a hypothesis, the end symbol included.
        num_hypotheses: How many hypotheses of each sentence to return, at most ``beam_size``.
        length_penalty_kind: ``gnmt``, ((5 + n) / 6)^alpha as in the paper, or ``power``, n^alpha.
        start_id: What the decoder reads first. None is ``config.bos_id``.
        source_mask: True where a source position holds a token [B, S]. None derives it from the ids.
        on_step: Called after each step with the unfinished hypotheses [B, K, n], best first; padding where none is.
        prefix_ids: Tokens that the hypotheses of each sentence begin with [B, P], without the start symbol, padded with
            ``config.pad_id``. They add 0 to the score, or their log-probability if ``rules.score_forced`` is set.
        rules: How other programs search, where it is not what is described here. None is the paper's.
        use_cache: False decodes the whole prefix again for each token: the same result, and many times the work.

    Raises:
        TypeError: Ids, sizes or lengths that are not integers, or a mask that is not boolean.
        ValueError: Ids or mask of the wrong shape, ids outside the vocabulary, a size, length or penalty that makes no
            sense, lengths that contradict each other or the model's positions, or a model that computes NaN.
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
        prefix_ids=prefix_ids,
    )
    return run_search(
        FastBeam if model.fast else Beam, model, source_ids, source_mask, search, on_step, use_cache=use_cache
    )


def sample(
    model: Transformer,
    source_ids: Any,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    max_length: int | None = None,
    min_length: int = 1,
    start_id: int | None = None,
    source_mask: Any = None,
    on_step: OnStep | None = None,
    *,
    prefix_ids: Any = None,
    rules: SearchRules | None = None,
    use_cache: bool = True,
) -> SearchResult:
    """Sample translations: draw each next token from the model's distribution until the end symbol is drawn.

    The same seed gives the same samples. A sample depends only on the seed, on its own number, and on the row of its
    sentence in the batch, not on the other sentences.

    Args:
        model: The model.
        source_ids: Source sentences [B, S], padded with ``config.pad_id``.
        num_samples: Number of samples per sentence.
        temperature: Divides the log-probabilities before a token is drawn; values below 1 favour likely tokens.
        top_k: Draw only from the ``top_k`` likeliest tokens (Fan et al., 2018). None uses all tokens.
        top_p: Draw only from the smallest set of likeliest tokens whose probabilities sum to at least ``top_p``
            (Holtzman et al., 2020). Applies after ``top_k``. None uses all tokens.
        seed: Seed of the random numbers, at least 0.
        max_length: Maximum number of tokens to generate, including the end symbol. None uses the source length + 50.
        min_length: Minimum number of tokens to generate, including the end symbol.
        start_id: First token that the decoder reads. None uses ``config.bos_id``.
        source_mask: True at source positions that hold a token [B, S]. None derives the mask from the ids.
        on_step: Called after each step with the samples so far [B, K, n], padded after the end symbol.
        prefix_ids: Tokens that the hypotheses of each sentence begin with [B, P], without the start symbol, padded with
            ``config.pad_id``. They add 0 to the score, or their log-probability if ``rules.score_forced`` is set.
        rules: Rules of other programs, for example banned tokens. None uses the paper's.
        use_cache: False recomputes the whole prefix for each token; slower, with the same result.

    Returns:
        ``num_samples`` hypotheses per sentence, in the order in which they are drawn. A score is the log-probability
        that the model assigns to the sample, before temperature, ``top_k`` and ``top_p``.

    Raises:
        TypeError: If ids, sizes or lengths are not integers, or the mask is not boolean.
        ValueError: If ids or mask have the wrong shape, ids are outside the vocabulary, a setting is out of range,
            lengths contradict each other or the model's positions, or the model computes NaN.
    """
    search = Search(
        num_hypotheses=check_integer("num_samples", num_samples, minimum=1),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=check_integer("seed", seed, minimum=0),
        min_length=min_length,
        max_length=max_length,
        start_id=start_id,
        rules=SearchRules() if rules is None else rules,
        prefix_ids=prefix_ids,
    )
    return run_search(Sample, model, source_ids, source_mask, search, on_step, use_cache=use_cache)


def score(
    model: Transformer, source_ids: Any, target_ids: Any, start_id: int | None = None, source_mask: Any = None
) -> Scores:
    """Return the log-probabilities that the model assigns to given translations, for example to rerank them.

    To score each token of the hypotheses of a search, pass its ``nbest_ids``.

    Args:
        model: The model.
        source_ids: Source sentences [B, S], padded with ``config.pad_id``.
        target_ids: One translation per sentence [B, T], or N of them [B, N, T], without the start symbol, including
            ``config.eos_id``, padded with ``config.pad_id``.
        start_id: First token that the decoder reads. None uses ``config.bos_id``.
        source_mask: True at source positions that hold a token [B, S]. None derives the mask from the ids.

    Returns:
        The log-probability of each translation [B] or [B, N], and of each of its tokens [B, T] or [B, N, T].

    Raises:
        TypeError: If ids are not integers, or the mask is not boolean.
        ValueError: If ids or mask have the wrong shape, ids are outside the vocabulary, or there are more tokens than
            the model has positions.
    """
    source_ids, source_mask = model._take("source", source_ids, source_mask)  # [B, S]
    target_ids = to_array("target_ids", target_ids)
    check_translations(target_ids.shape, len(source_ids))
    labels, _ = model._take("target", target_ids.reshape(-1, target_ids.shape[-1]), None)  # [B * N, T]
    start = np.full_like(labels[:, :1], check_start(start_id, model.config))
    source_ids, source_mask = (x.repeat(len(labels) // len(x), 0) for x in (source_ids, source_mask))
    scores = log_softmax(model(source_ids, np.concatenate([start, labels[:, :-1]], 1), source_mask))  # [B * N, T, V]
    tokens = np.take_along_axis(scores, labels[:, :, None], -1)[:, :, 0]
    is_token = labels != model.config.pad_id
    tokens, is_token = (x.reshape(target_ids.shape) for x in (np.where(is_token, tokens, 0.0), is_token))
    return Scores(np.where(is_token.any(-1), tokens.sum(-1), -inf), tokens)


def top(values: Float[ndarray, "B N"], count: int) -> tuple[Float[ndarray, "B K"], Int[ndarray, "B K"]]:
    """Return the largest values of each row and their indices. Of equal values, the first comes first."""
    values = np.where(np.isnan(values), inf, values)  # NaN comes first, so that it is noticed
    index = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(values, index, -1), index


class Greedy(NamedTuple):
    """How far greedy search has come; K is 1."""

    tokens: Int[ndarray, "B K"]  # what is read next
    ids: Int[ndarray, "B K capacity"]
    scores: Float[ndarray, "B K"]
    unfinished: Bool[ndarray, "B K"]

    @classmethod
    def start(cls, plan: SearchPlan) -> Greedy:
        """Return the state before the first step: no hypothesis has a token."""
        size = [len(plan.limits), plan.beam_size]
        return cls(
            tokens=np.full(size, plan.start_id),
            ids=np.full([*size, plan.capacity], plan.pad_id),
            scores=np.zeros(size, plan.penalties.dtype),
            unfinished=np.broadcast_to((plan.limits > 0)[:, None], size),
        )

    def step(self, logits: Float[ndarray, "R V"], n: Any, plan: SearchPlan) -> tuple[Greedy, None]:
        """Return the state after the n-th token of each unfinished hypothesis, given the logits; no row moves."""
        log_probabilities = _next_log_probabilities(logits, self.ids, n, plan)  # [R, V]
        index = self.choose(log_probabilities, n, plan)
        best = np.take_along_axis(log_probabilities, index[:, None], 1).reshape(self.scores.shape)
        tokens = np.where(self.unfinished, index.reshape(self.scores.shape), plan.pad_id)
        ids = self.ids
        ids[:, :, n - 1] = tokens
        scores = self.scores + np.where(self.unfinished, best, 0.0)
        unfinished = self.unfinished & (tokens != plan.eos_id) & (n < plan.limits[:, None])
        return self._replace(tokens=tokens, ids=ids, scores=scores, unfinished=unfinished), None

    def choose(self, log_probabilities: Float[ndarray, "R V"], n: Any, plan: SearchPlan) -> Int[ndarray, " R"]:
        """Return the likeliest token of each row; of equally likely ones, the first."""
        return log_probabilities.argmax(-1)

    def goes_on(self) -> Any:
        """Whether any sentence is unfinished."""
        return self.unfinished.any()

    def best(self) -> tuple[Int[ndarray, "B K capacity"], Float[ndarray, "B K"]]:
        """Return the hypotheses of each sentence, and their scores."""
        return self.ids, self.scores


class Sample(Greedy):
    """How far sampling has come."""

    def choose(self, log_probabilities: Float[ndarray, "R V"], n: Any, plan: SearchPlan) -> Int[ndarray, " R"]:
        """Return the token of each row that its random number falls on, likely tokens first."""
        values, index = top(log_probabilities, log_probabilities.shape[1])  # [R, V]
        shares = masked_softmax(np.where(np.arange(values.shape[1]) < plan.top_k, values / plan.temperature, -inf))
        shares = np.where(shares.cumsum(-1) - shares < plan.top_p, shares, 0.0)
        sums = shares.cumsum(-1)
        drawn = plan.uniforms[:, :, n - 1].reshape(-1, 1) * sums[:, -1:]  # [R, 1]
        rank = np.minimum((sums <= drawn).sum(-1), (shares > 0.0).sum(-1) - 1)  # a product may round up to the sum
        return np.take_along_axis(index, rank[:, None], 1)[:, 0]


class Beam(NamedTuple):
    """How far beam search has come."""

    tokens: Int[ndarray, "B K"]  # what is read next
    ids: Int[ndarray, "B K capacity"]  # padding where no hypothesis is
    alive: Float[ndarray, "B K"]  # log-probabilities; -inf is no hypothesis
    finished_ids: Int[ndarray, "B P capacity"]
    finished: Float[ndarray, "B P"]  # scores, best first

    top = staticmethod(top)  # type: ignore[misc]  # no field

    @classmethod
    def start(cls, plan: SearchPlan) -> Beam:
        """Return the state before the first step: there is one hypothesis of each sentence, the empty one."""
        shape, kept = [len(plan.limits), plan.beam_size], [len(plan.limits), plan.pool_size]
        is_empty_one = (plan.limits > 0)[:, None] & (np.arange(plan.beam_size) == 0)
        return cls(  # type: ignore[call-arg]
            tokens=np.full(shape, plan.start_id),
            ids=np.full([*shape, plan.capacity], plan.pad_id),
            alive=np.where(is_empty_one, np.zeros(shape, plan.penalties.dtype), -inf),
            finished_ids=np.full([*kept, plan.capacity], plan.pad_id),
            finished=np.full(kept, -inf, plan.penalties.dtype),
        )

    def step(self, logits: Float[ndarray, "R V"], n: Any, plan: SearchPlan) -> tuple[Beam, Int[ndarray, " R"]]:
        """Return the state after the n-th token of each hypothesis, given the logits, and the row each goes on from."""
        (batch, beam_size), pool_size, vocabulary = self.alive.shape, self.finished.shape[1], logits.shape[1]
        sentence = np.arange(batch)[:, None]
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
        ended = np.where(ends, best / plan.penalties[n], -inf)[:, :beam_size]
        if plan.rules.pool == "first":
            ended = within_pool(ended, self.finished)
        finished, rank = self.top(np.concatenate([self.finished, ended], 1), pool_size)  # [B, P]
        finished_ids = np.concatenate([self.finished_ids, candidates[:, :beam_size]], 1)[sentence, rank]
        # 3. Go on with the best that do not end, unless none of them can still be among the best.
        alive, rank = self.top(np.where(~ends, best, -inf), beam_size)  # [B, K]
        longest = n if plan.rules.stop == "current" else plan.limits
        attainable = alive[:, 0] / plan.penalties[longest]  # if all its further tokens were certain
        is_over = finished[:, -1] >= attainable
        if plan.rules.stop == "first":
            is_over = finished[:, -1] != -inf
        alive = np.where(~is_over[:, None], alive, -inf)
        ids = np.where((alive != -inf)[:, :, None], candidates[sentence, rank], plan.pad_id)
        tokens, parent = token[sentence, rank], parent[sentence, rank]
        rows = (sentence * beam_size + parent).reshape(-1)
        state = self._replace(tokens=tokens, ids=ids, alive=alive, finished_ids=finished_ids, finished=finished)
        return state, rows

    def goes_on(self) -> Any:
        """Whether any hypothesis is unfinished."""
        return (self.alive != -inf).any()

    def best(self) -> tuple[Int[ndarray, "B P capacity"], Float[ndarray, "B P"]]:
        """Return the best finished hypotheses of each sentence, best first, and their scores."""
        return self.finished_ids, self.finished


class FastBeam(Beam):
    """Beam search with a faster choice of the best continuations."""

    top = staticmethod(fast.top)


def _next_log_probabilities(logits, ids, n, plan):
    """Return the log-probability of each next token [R, V], with -inf for tokens that are not allowed."""
    log_probabilities = log_softmax(logits)
    log_probabilities[:, plan.pad_id] = -inf
    if n < plan.min_length:
        log_probabilities[:, plan.eos_id] = -inf
    return apply_rules(log_probabilities, ids, n, plan)
