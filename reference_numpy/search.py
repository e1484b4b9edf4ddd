"""Search (Vaswani et al., 2017, section 6.1): greedy search, beam search, sampling, and scoring of given translations.

Axes: B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder.
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
from reference_numpy.transformer import Transformer, check_model
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
    """Return the translation that greedy search finds by choosing the most likely token in each step, until EOS.

    Padding is never generated. Ties go to the lower token ID. The result for a sequence doesn't depend on the other
    sequences in the batch.

    Args:
        model: Model to search with.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        max_length: Maximum number of tokens, including EOS. By default, ``rules`` limits it to the source length + 50.
        min_length: Minimum number of tokens, including EOS.
        start_id: First token that the decoder reads. If None, ``config.bos_id`` is used.
        source_mask: True for source positions that contain a token [B, S]. If None, it is derived from ``source_ids``.
        on_step: Function that is called after each step with the tokens so far [B, 1, n], padded after EOS.
        prefix_ids: First tokens of each hypothesis, without BOS, as a padded array [B, P]. They don't contribute to the
            score unless ``rules.score_forced`` is True. If None, no prefix is used.
        rules: Search rules, such as ``SearchRules.preset("hf")``. If None, the paper's rules are used.
        use_cache: If False, recompute the full prefix in each step. The result is the same, but the search is much
            slower.

    Returns:
        One hypothesis per sequence. Its score is its log-probability in nats.

    Raises:
        TypeError: If IDs, sizes, or lengths are not integers, or the mask is not boolean.
        ValueError: If an argument has an invalid shape or value, or the model computes NaN.
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
    """Return the best translations that beam search finds.

    Each step extends every unfinished hypothesis by every token and considers the ``beam_size`` most likely extensions.
    If an extension ends with EOS or reaches the maximum length, it is ranked by its log-probability divided by the
    length penalty. The search keeps the ``beam_size`` most likely unfinished extensions. The search of a sequence stops
    when no unfinished hypothesis can become one of the best ``num_hypotheses``. Among extensions, ties go to the
    extension of the better hypothesis, then to the lower token ID. Among finished hypotheses, ties go to the hypothesis
    that finished earlier. Padding is never generated. The result for a sequence doesn't depend on the other sequences
    in the batch.

    Args:
        model: Model to search with.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        beam_size: Number of unfinished hypotheses to keep per sequence. It may exceed the vocabulary size.
        length_penalty: Exponent alpha of the length penalty. If it is 0, short hypotheses have an advantage.
        max_length: Maximum number of tokens, including EOS. By default, ``rules`` limits it to the source length + 50.
        min_length: Minimum number of tokens, including EOS.
        num_hypotheses: Number of hypotheses to return per sequence, at most ``beam_size``.
        length_penalty_kind: Penalty for n tokens: ((5 + n) / 6)^alpha for ``gnmt`` (the paper), n^alpha for ``power``.
        start_id: First token that the decoder reads. If None, ``config.bos_id`` is used.
        source_mask: True for source positions that contain a token [B, S]. If None, it is derived from ``source_ids``.
        on_step: Function that is called after each step with the unfinished hypotheses [B, K, n], best first.
        prefix_ids: First tokens of each hypothesis, without BOS, as a padded array [B, P]. They don't contribute to the
            score unless ``rules.score_forced`` is True. If None, no prefix is used.
        rules: Search rules, such as ``SearchRules.preset("hf")``. If None, the paper's rules are used.
        use_cache: If False, recompute the full prefix in each step. The result is the same, but the search is much
            slower.

    Returns:
        The best hypotheses of each sequence and their scores, best first.

    Raises:
        TypeError: If IDs, sizes, or lengths are not integers, or the mask is not boolean.
        ValueError: If an argument has an invalid shape or value, or the model computes NaN.
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
        FastBeam if getattr(model, "fast", False) else Beam,
        model,
        source_ids,
        source_mask,
        search,
        on_step,
        use_cache=use_cache,
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
    """Return translations that are sampled token by token from the model's distribution, until EOS.

    The random numbers of a sample depend only on the seed, the index of the sample, and the row of its sequence.

    Args:
        model: Model to search with.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        num_samples: Number of samples per sequence.
        temperature: Divisor of the log-probabilities. Values below 1 favor likely tokens.
        top_k: Number of most likely tokens to sample from (Fan et al., 2018). If None, all tokens are used.
        top_p: Sample only from the smallest set of most likely tokens whose total probability is at least ``top_p``
            (Holtzman et al., 2020). ``top_k`` is applied first. If None, all tokens are used.
        seed: Seed for the random numbers. It must be at least 0.
        max_length: Maximum number of tokens, including EOS. By default, ``rules`` limits it to the source length + 50.
        min_length: Minimum number of tokens, including EOS.
        start_id: First token that the decoder reads. If None, ``config.bos_id`` is used.
        source_mask: True for source positions that contain a token [B, S]. If None, it is derived from ``source_ids``.
        on_step: Function that is called after each step with the samples so far [B, K, n], padded after EOS.
        prefix_ids: First tokens of each hypothesis, without BOS, as a padded array [B, P]. They don't contribute to the
            score unless ``rules.score_forced`` is True. If None, no prefix is used.
        rules: Search rules, such as ``SearchRules.preset("hf")``. If None, the paper's rules are used.
        use_cache: If False, recompute the full prefix in each step. The result is the same, but the search is much
            slower.

    Returns:
        ``num_samples`` hypotheses per sequence, in the order in which they are sampled. A score is the log-probability
        in nats that the model assigns to the sample, before ``temperature``, ``top_k``, and ``top_p`` are applied.

    Raises:
        TypeError: If IDs, sizes, or lengths are not integers, or the mask is not boolean.
        ValueError: If an argument has an invalid shape or value, or the model computes NaN.
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
    """Return the log-probabilities in nats that the model assigns to given translations, for example to rerank them.

    To score each token of the hypotheses of a search, pass ``nbest_ids`` of the search result. Dropout is off.

    Args:
        model: Model to score with.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        target_ids: One translation per sequence [B, T], or N translations per sequence [B, N, T]. They include EOS but
            not BOS, and are padded with ``config.pad_id``.
        start_id: First token that the decoder reads. If None, ``config.bos_id`` is used.
        source_mask: True for source positions that contain a token [B, S]. If None, it is derived from ``source_ids``.

    Returns:
        The log-probability of each translation [B] or [B, N], and of each of its tokens [B, T] or [B, N, T].

    Raises:
        TypeError: If the IDs are not integers, or the mask is not boolean.
        ValueError: If the IDs or the mask have the wrong shape, an ID is outside the vocabulary, or a translation is
            too long.
    """
    check_model(model)
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
    """Return the largest values of each row and their indices. Ties go to the lower index."""
    values = np.where(np.isnan(values), inf, values)  # rank NaN first, so that the search raises an error
    index = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(values, index, -1), index


class Greedy(NamedTuple):
    """State of greedy search between two steps. K is 1."""

    tokens: Int[ndarray, "B K"]  # input of the next step
    ids: Int[ndarray, "B K capacity"]
    scores: Float[ndarray, "B K"]
    unfinished: Bool[ndarray, "B K"]

    @classmethod
    def start(cls, plan: SearchPlan) -> Greedy:
        """Return the state before the first step, in which each hypothesis is empty."""
        size = [len(plan.limits), plan.beam_size]
        return cls(
            tokens=np.full(size, plan.start_id),
            ids=np.full([*size, plan.capacity], plan.pad_id),
            scores=np.zeros(size, plan.penalties.dtype),
            unfinished=np.broadcast_to((plan.limits > 0)[:, None], size),
        )

    def step(self, logits: Float[ndarray, "R V"], n: Any, plan: SearchPlan) -> tuple[Greedy, None]:
        """Given the logits, return the state after step n and None. None means that the rows keep their order."""
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
        """Return the most likely token of each row. Ties go to the lower token ID."""
        return log_probabilities.argmax(-1)

    def goes_on(self) -> Any:
        """Return whether any sequence is unfinished."""
        return self.unfinished.any()

    def best(self) -> tuple[Int[ndarray, "B K capacity"], Float[ndarray, "B K"]]:
        """Return the hypotheses of each sequence and their scores."""
        return self.ids, self.scores


class Sample(Greedy):
    """State of sampling between two steps."""

    def choose(self, log_probabilities: Float[ndarray, "R V"], n: Any, plan: SearchPlan) -> Int[ndarray, " R"]:
        """Sort the tokens of each row by probability, and return the token at a random quantile."""
        values, index = top(log_probabilities, log_probabilities.shape[1])  # [R, V]
        probs = masked_softmax(np.where(np.arange(values.shape[1]) < plan.top_k, values / plan.temperature, -inf))
        probs = np.where(probs.cumsum(-1) - probs < plan.top_p, probs, 0.0)
        sums = probs.cumsum(-1)
        drawn = plan.uniforms[:, :, n - 1].reshape(-1, 1) * sums[:, -1:]  # [R, 1]
        # Rounding may make ``drawn`` equal to the last sum.
        rank = np.minimum((sums <= drawn).sum(-1), (probs > 0.0).sum(-1) - 1)
        return np.take_along_axis(index, rank[:, None], 1)[:, 0]


class Beam(NamedTuple):
    """State of beam search between two steps."""

    tokens: Int[ndarray, "B K"]  # input of the next step
    ids: Int[ndarray, "B K capacity"]  # padding for unused entries
    alive: Float[ndarray, "B K"]  # log-probabilities, -inf for unused entries
    finished_ids: Int[ndarray, "B P capacity"]
    finished: Float[ndarray, "B P"]  # scores, best first

    top = staticmethod(top)  # type: ignore[misc]  # not a field

    @classmethod
    def start(cls, plan: SearchPlan) -> Beam:
        """Return the state before the first step: each sequence has one empty hypothesis."""
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
        """Given the logits, return the state after step n and the row that each hypothesis extends."""
        (batch, beam_size), pool_size, vocabulary = self.alive.shape, self.finished.shape[1], logits.shape[1]
        sentence = np.arange(batch)[:, None]
        # 1. Extend each hypothesis by every token. 2K extensions are enough, because at most K of them end with EOS.
        log_probabilities = _next_log_probabilities(logits, self.ids, n, plan)  # [R, V]
        totals = self.alive[:, :, None] + log_probabilities.reshape(batch, beam_size, vocabulary)  # [B, K, V]
        best, index = self.top(totals.reshape(batch, -1), 2 * beam_size)  # [B, 2K]
        if plan.rules.beam_shrinks:
            best = within_pool(best, self.finished)
        parent, token = index // vocabulary, index % vocabulary
        candidates = self.ids[sentence, parent]  # [B, 2K, capacity]
        candidates[:, :, n - 1] = token
        ends = (token == plan.eos_id) | (plan.limits == n)[:, None]
        # 2. If any of the best K extensions end, add them to the pool, which keeps the best hypotheses.
        ended = np.where(ends, best / plan.penalties[n], -inf)[:, :beam_size]
        if plan.rules.pool == "first":
            ended = within_pool(ended, self.finished)
        finished, rank = self.top(np.concatenate([self.finished, ended], 1), pool_size)  # [B, P]
        finished_ids = np.concatenate([self.finished_ids, candidates[:, :beam_size]], 1)[sentence, rank]
        # 3. Continue with the best K extensions that don't end, if at least one of them can still enter the pool.
        alive, rank = self.top(np.where(~ends, best, -inf), beam_size)  # [B, K]
        longest = n if plan.rules.stop == "current" else plan.limits
        attainable = alive[:, 0] / plan.penalties[longest]  # score if all further tokens had probability 1
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
        """Return whether any hypothesis is unfinished."""
        return (self.alive != -inf).any()

    def best(self) -> tuple[Int[ndarray, "B P capacity"], Float[ndarray, "B P"]]:
        """Return the best finished hypotheses of each sequence and their scores, best first."""
        return self.finished_ids, self.finished


class FastBeam(Beam):
    """Beam search with a faster selection of the best extensions."""

    top = staticmethod(fast.top)


def _next_log_probabilities(logits, ids, n, plan):
    """Return the log-probabilities of the next tokens [R, V], with -inf for tokens that are not allowed."""
    log_probabilities = log_softmax(logits)
    log_probabilities[:, plan.pad_id] = -inf
    if n < plan.min_length:
        log_probabilities[:, plan.eos_id] = -inf
    return apply_rules(log_probabilities, ids, n, plan)
