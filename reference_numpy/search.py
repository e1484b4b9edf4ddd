"""Search (Vaswani et al., 2017, section 6.1): greedy and beam, one token after another.

B batch, K beam size, N number of hypotheses, V target vocabulary, R = B * K rows of the decoder.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reference_numpy.functional import log_softmax
from reference_numpy.search_plan import OnStep, SearchResult, plan_search, search_result
from reference_numpy.transformer import Transformer


def greedy_search(
    model: Transformer,
    source_ids: Any,
    max_length: int | None = None,
    min_length: int = 1,
    start_id: int | None = None,
    source_mask: Any = None,
    on_step: OnStep | None = None,
    *,
    use_cache: bool = True,
) -> SearchResult:
    """Say the likeliest next token, again and again, until it is the end symbol.

    Padding is never said. Of equally likely tokens, the one with the lower id is taken. What is found for a sentence
    does not depend on the other sentences of the batch.

    Args:
        model: The model.
        source_ids: The source sentences [B, S], padded with ``config.pad_id``.
        max_length: The most tokens to say, the end symbol included. None is the length of each source sentence + 50.
        min_length: The fewest tokens to say, the end symbol included.
        start_id: What the decoder reads first. None is ``config.bos_id``.
        source_mask: True where a source position holds a token [B, S]. None derives it from the ids.
        on_step: Called after each step with the tokens so far [B, 1, n], padded behind the end symbol.
        use_cache: False decodes the whole prefix again for each token: the same result, and many times the work.

    Returns:
        One hypothesis for each sentence; its score is its log-probability.

    Raises:
        TypeError: Ids or lengths that are not integers, or a mask that is not boolean.
        ValueError: Ids or mask of the wrong shape, ids outside the vocabulary, lengths that contradict each other or
            the model's positions, or a model that computes NaN.
    """
    config = model.config
    source_ids, source_mask = model._take_source(source_ids, source_mask)
    plan = plan_search(config, source_mask, max_length, min_length, start_id)
    steps = (_CachedSteps if use_cache else _PlainSteps)(model, source_ids, source_mask, plan.capacity)
    tokens = np.full(len(source_ids), plan.start_id)
    ids = np.full((len(source_ids), 1, plan.capacity), config.pad_id)
    scores = np.zeros((len(source_ids), 1), model.source_embedding.table.dtype)
    unfinished = np.ones(len(source_ids), bool)
    for n in range(1, plan.capacity + 1):
        log_probabilities = _next_log_probabilities(steps.logits(tokens), config, n < plan.min_length)  # [B, V]
        tokens = np.where(unfinished, log_probabilities.argmax(-1), config.pad_id)
        ids[:, 0, n - 1] = tokens
        scores[unfinished, 0] += log_probabilities[unfinished, tokens[unfinished]]
        if on_step is not None:
            on_step(ids[:, :, :n].copy())
        unfinished &= (tokens != config.eos_id) & (n < plan.limits)
        if not unfinished.any():
            break
    return search_result(ids, scores, config.pad_id)


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
    use_cache: bool = True,
) -> SearchResult:
    """Keep the likeliest unfinished hypotheses, let each go on in every way, and return the best that ended.

    In each step, the ``beam_size`` likeliest continuations are looked at. Those that end, by the end symbol or at the
    maximum length, are finished, and ranked by log-probability over length penalty. The ``beam_size`` likeliest that do
    not end go on. The search of a sentence stops as soon as no unfinished hypothesis can become one of the best
    ``num_hypotheses``. Of equally likely continuations, the one of the better hypothesis comes first, then the one with
    the lower id; of equally good finished hypotheses, the one found first.

    Padding is never said. A beam may be wider than the vocabulary: then it fills up within a few steps. What is found
    for a sentence does not depend on the other sentences of the batch.

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
        use_cache: False decodes the whole prefix again for each token: the same result, and many times the work.

    Raises:
        TypeError: Ids, sizes or lengths that are not integers, or a mask that is not boolean.
        ValueError: Ids or mask of the wrong shape, ids outside the vocabulary, a size, length or penalty that makes no
            sense, lengths that contradict each other or the model's positions, or a model that computes NaN.
    """
    config = model.config
    source_ids, source_mask = model._take_source(source_ids, source_mask)
    plan = plan_search(
        config,
        source_mask,
        max_length,
        min_length,
        start_id,
        beam_size,
        num_hypotheses,
        length_penalty,
        length_penalty_kind,
    )
    steps = (_CachedSteps if use_cache else _PlainSteps)(model, source_ids, source_mask, plan.capacity, beam_size)
    batch, vocabulary, dtype = len(source_ids), config.target_vocab_size, model.source_embedding.table.dtype
    penalties = plan.penalties.astype(dtype)
    sentence = np.arange(batch)[:, None]
    tokens = np.full((batch, beam_size), plan.start_id)
    ids = np.full((batch, beam_size, plan.capacity), config.pad_id)
    alive = np.full((batch, beam_size), -np.inf, dtype)  # log-probabilities; -inf is no hypothesis
    alive[:, 0] = 0.0  # there is one to begin with: the empty one
    finished_ids = np.full((batch, num_hypotheses, plan.capacity), config.pad_id)
    finished = np.full((batch, num_hypotheses), -np.inf, dtype)  # scores, best first
    for n in range(1, plan.capacity + 1):
        # 1. Let each hypothesis go on in every way; twice the beam is enough, since each can end in one way only.
        log_probabilities = _next_log_probabilities(steps.logits(tokens.reshape(-1)), config, n < plan.min_length)
        totals = alive[:, :, None] + log_probabilities.reshape(batch, beam_size, vocabulary)  # [B, K, V]
        best, index = _top(totals.reshape(batch, -1), 2 * beam_size)  # [B, 2K]
        parent, token = index // vocabulary, index % vocabulary
        candidates = ids[sentence, parent]  # [B, 2K, capacity]
        candidates[:, :, n - 1] = token
        ends = (token == config.eos_id) | (plan.limits == n)[:, None]
        # 2. Of those within the beam that end, keep the best.
        ended = np.where(ends, best / penalties[n], -np.inf)[:, :beam_size]
        finished, rank = _top(np.concatenate([finished, ended], 1), num_hypotheses)  # [B, N]
        finished_ids = np.concatenate([finished_ids, candidates[:, :beam_size]], 1)[sentence, rank]
        # 3. Go on with the best that do not end, unless none of them can still be among the best.
        alive, rank = _top(np.where(ends, -np.inf, best), beam_size)  # [B, K]
        attainable = alive[:, 0] / penalties[plan.limits]  # if all that it says from here on were certain
        alive[finished[:, -1] >= attainable] = -np.inf
        ids, tokens = candidates[sentence, rank], token[sentence, rank]
        if on_step is not None:
            on_step(np.where(np.isneginf(alive)[:, :, None], config.pad_id, ids[:, :, :n]))
        if np.isneginf(alive).all():
            break
        steps.reorder((sentence * beam_size + parent[sentence, rank]).reshape(-1))
    finished_ids[np.isneginf(finished)] = config.pad_id
    return search_result(finished_ids, finished, config.pad_id)


def _next_log_probabilities(logits, config, too_short):
    """Return the log-probability of each next token [R, V], with -inf for what may not be said."""
    log_probabilities = log_softmax(logits)
    log_probabilities[:, config.pad_id] = -np.inf
    if too_short:
        log_probabilities[:, config.eos_id] = -np.inf
    return log_probabilities


def _top(values, count):
    """Return the largest values of each row and where they are; of equal ones, the first come first."""
    values = np.where(
        np.isnan(values), np.inf, values
    )  # NaN comes first, so that a model that computes it is found out
    if values.shape[1] > 8 * count:  # sorting what is large enough is faster than sorting all
        large = [np.flatnonzero(row >= np.partition(row, -count)[-count]) for row in values]
        index = np.stack(
            [at[np.argsort(-row[at], kind="stable")[:count]] for row, at in zip(values, large, strict=True)]
        )
    else:
        index = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(values, index, -1), index


class _CachedSteps:
    """Decode one position after another, each once."""

    def __init__(self, model, source_ids, source_mask, capacity, beam_size=1):
        self.model = model
        self.cache = model.init_cache(source_ids, capacity, beam_size, source_mask)

    def logits(self, tokens):
        """Return the logits [R, V] of what comes after one more token of each row."""
        logits, self.cache = self.model.decode_step(tokens, self.cache)
        return logits

    def reorder(self, rows):
        """Let each row go on from another one."""
        self.cache.reorder(rows)


class _PlainSteps:
    """Decode the whole prefix for each token: what a cache has to be equal to."""

    def __init__(self, model, source_ids, source_mask, capacity, beam_size=1):
        memory = model.encode(source_ids, source_mask)
        self.model = model
        self.source_ids = source_ids.repeat(beam_size, 0)  # [R, S]
        self.memory = memory.repeat(beam_size, 0)  # [R, S, d_model]
        self.source_mask = source_mask.repeat(beam_size, 0)
        self.prefix = np.zeros((len(self.memory), 0), int)  # [R, n]

    def logits(self, tokens):
        """Return the logits [R, V] of what comes after one more token of each row."""
        self.prefix = np.concatenate([self.prefix, tokens[:, None]], 1)
        logits = self.model.decode(self.prefix, self.memory, self.source_ids, source_mask=self.source_mask)
        return logits[:, -1]

    def reorder(self, rows):
        """Let each row go on from another one."""
        self.prefix = self.prefix[rows]
