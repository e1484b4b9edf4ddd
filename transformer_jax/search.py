"""Search (Vaswani et al., 2017, section 6.1): greedy and beam, one token after another.

B batch, K beam size, N number of hypotheses, V target vocabulary, R = B * K rows of the decoder.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reference_numpy.checks import check_ids, check_mask
from reference_numpy.search_plan import OnStep, SearchResult, plan_search, search_result
from transformer_jax.decoder import DecoderCache
from transformer_jax.transformer import Transformer

BUCKET = 32  # lengths are rounded up to a multiple of it, so that few have to be compiled for


def greedy_search(
    model: Transformer,
    source_ids: Any,
    max_length: int | None = None,
    min_length: int = 1,
    start_id: int | None = None,
    source_mask: Any = None,
    on_step: OnStep | None = None,
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

    Returns:
        One hypothesis for each sentence; its score is its log-probability.

    Raises:
        TypeError: Ids or lengths that are not integers, or a mask that is not boolean.
        ValueError: Ids or mask of the wrong shape, ids outside the vocabulary, lengths that contradict each other or
            the model's positions, or a model that computes NaN.
    """
    config = model.config
    source_ids, source_mask = _take_source(config, source_ids, source_mask)
    plan = plan_search(config, source_mask, max_length, min_length, start_id)
    state = _search(_Greedy, model, source_ids, source_mask, plan, on_step)
    batch = len(source_ids)
    return search_result(np.array(state.ids, int)[:batch], np.array(state.scores)[:batch], config.pad_id)


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

    Raises:
        TypeError: Ids, sizes or lengths that are not integers, or a mask that is not boolean.
        ValueError: Ids or mask of the wrong shape, ids outside the vocabulary, a size, length or penalty that makes no
            sense, lengths that contradict each other or the model's positions, or a model that computes NaN.
    """
    config = model.config
    source_ids, source_mask = _take_source(config, source_ids, source_mask)
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
    state = _search(_Beam, model, source_ids, source_mask, plan, on_step, beam_size, num_hypotheses)
    batch = len(source_ids)
    finished_ids, finished = np.array(state.finished_ids, int)[:batch], np.array(state.finished)[:batch]
    finished_ids[np.isneginf(finished)] = config.pad_id
    return search_result(finished_ids, finished, config.pad_id)


class _Numbers(NamedTuple):
    """What the steps depend on and are not compiled for."""

    min_length: Any
    limits: Any  # [B]
    penalties: Any  # [n]


class _Greedy(NamedTuple):
    """What greedy search goes on from."""

    tokens: Array  # [B]
    ids: Array  # [B, 1, capacity]
    scores: Array  # [B, 1]
    unfinished: Array  # [B]
    cache: DecoderCache

    @classmethod
    def start(cls, config, cache, dtype, start_id, is_sentence, beam_size, num_hypotheses):
        batch, capacity = len(is_sentence), cache.self_mask.shape[3]
        return cls(
            tokens=jnp.full(batch, start_id, jnp.int32),
            ids=jnp.full((batch, beam_size, capacity), config.pad_id, jnp.int32),
            scores=jnp.zeros((batch, num_hypotheses), dtype),
            unfinished=is_sentence,
            cache=cache,
        )

    def goes_on(self):
        return self.unfinished.any()

    def step(self, model, numbers):
        config, (min_length, limits, _) = model.config, numbers
        tokens, ids, scores, unfinished, cache = self
        logits, cache = model.decode_step(tokens, cache)
        n = cache.length
        log_probabilities = _next_log_probabilities(logits, config, n < min_length)  # [B, V]
        best, index = jax.lax.top_k(log_probabilities, 1)  # [B, 1]; on a CPU, argmax takes twice as long
        tokens = jnp.where(unfinished, index[:, 0], config.pad_id)
        ids = _put(ids, tokens[:, None], n)
        scores = jnp.where(unfinished[:, None], scores + best, scores)
        unfinished &= (tokens != config.eos_id) & (n < limits)
        return _Greedy(tokens, ids, scores, unfinished, cache)


class _Beam(NamedTuple):
    """What beam search goes on from."""

    tokens: Array  # [B, K]
    ids: Array  # [B, K, capacity]; padding where no hypothesis is
    alive: Array  # [B, K], log-probabilities; -inf is no hypothesis
    finished_ids: Array  # [B, N, capacity]
    finished: Array  # [B, N], scores, best first
    cache: DecoderCache

    @classmethod
    def start(cls, config, cache, dtype, start_id, is_sentence, beam_size, num_hypotheses):
        batch, capacity = len(is_sentence), cache.self_mask.shape[3]
        is_empty = is_sentence[:, None] & (jnp.arange(beam_size) == 0)  # there is one to begin with: the empty one
        return cls(
            tokens=jnp.full((batch, beam_size), start_id, jnp.int32),
            ids=jnp.full((batch, beam_size, capacity), config.pad_id, jnp.int32),
            alive=jnp.where(is_empty, 0.0, -jnp.inf).astype(dtype),
            finished_ids=jnp.full((batch, num_hypotheses, capacity), config.pad_id, jnp.int32),
            finished=jnp.full((batch, num_hypotheses), -jnp.inf, dtype),
            cache=cache,
        )

    def goes_on(self):
        return ~jnp.isneginf(self.alive).all()

    def step(self, model, numbers):
        config, (min_length, limits, penalties) = model.config, numbers
        tokens, ids, alive, finished_ids, finished, cache = self
        (batch, beam_size), num_hypotheses, vocabulary = tokens.shape, finished.shape[1], config.target_vocab_size
        penalties = penalties.astype(alive.dtype)
        sentence = jnp.arange(batch)[:, None]
        logits, cache = model.decode_step(tokens.reshape(-1), cache)
        n = cache.length
        # 1. Let each hypothesis go on in every way; twice the beam is enough, since each can end in one way only.
        log_probabilities = _next_log_probabilities(logits, config, n < min_length)
        totals = alive[:, :, None] + log_probabilities.reshape(batch, beam_size, vocabulary)  # [B, K, V]
        best, index = jax.lax.top_k(totals.reshape(batch, -1), 2 * beam_size)  # [B, 2K]
        parent, token = index // vocabulary, index % vocabulary
        candidates = _put(ids[sentence, parent], token, n)  # [B, 2K, capacity]
        ends = (token == config.eos_id) | (limits == n)[:, None]
        # 2. Of those within the beam that end, keep the best.
        ended = jnp.where(ends, best / penalties[n], -jnp.inf)[:, :beam_size]
        finished, rank = jax.lax.top_k(jnp.concatenate([finished, ended], 1), num_hypotheses)  # [B, N]
        finished_ids = jnp.concatenate([finished_ids, candidates[:, :beam_size]], 1)[sentence, rank]
        # 3. Go on with the best that do not end, unless none of them can still be among the best.
        alive, rank = jax.lax.top_k(jnp.where(ends, -jnp.inf, best), beam_size)  # [B, K]
        attainable = alive[:, 0] / penalties[limits]  # if all that it says from here on were certain
        alive = jnp.where((finished[:, -1] >= attainable)[:, None], -jnp.inf, alive)
        ids = jnp.where(jnp.isneginf(alive)[:, :, None], config.pad_id, candidates[sentence, rank])
        tokens = token[sentence, rank]
        cache.reorder((sentence * beam_size + parent[sentence, rank]).reshape(-1))
        return _Beam(tokens, ids, alive, finished_ids, finished, cache)


def _take_source(config, ids, mask):
    """Take the source from the outside, checked, as NumPy's: what JAX did to it would be compiled for every shape."""
    ids = np.asarray(ids)
    check_ids("source_ids", ids.shape, ids.dtype.name, config.source_vocab_size, config.max_positions, ids)
    mask = ids != config.pad_id if mask is None else np.asarray(mask)
    check_mask("source_mask", mask.shape, mask.dtype.name, ids.shape)
    return ids, mask


def _search(kind, model, source_ids, source_mask, plan, on_step, beam_size=1, num_hypotheses=1):
    """Search until all is said, and return the state then; behind the batch it has rows of padding."""
    config, (batch, width) = model.config, source_ids.shape
    rows = (0, (1 << (batch - 1).bit_length()) - batch)  # up to a power of two
    columns = (0, _rounded_up(width, config) - width)
    capacity = _rounded_up(plan.capacity, config)
    numbers = _Numbers(
        plan.min_length, np.pad(plan.limits, rows), np.pad(plan.penalties, (0, capacity - plan.capacity))
    )
    # The model is taken apart once: its leaves pass into compiled code, which is kept by structure and sizes.
    leaves, structure = jax.tree.flatten(model)
    state = _start(
        structure,
        leaves,
        np.pad(source_ids.astype(np.int32), (rows, columns), constant_values=config.pad_id),
        np.pad(source_mask, (rows, columns)),
        np.arange(batch + rows[1]) < batch,
        plan.start_id,
        kind=kind,
        capacity=capacity,
        beam_size=beam_size,
        num_hypotheses=num_hypotheses,
    )
    for n in [plan.capacity] if on_step is None else range(1, plan.capacity + 1):
        state, goes_on = _advance(structure, leaves, state, numbers, n)
        if on_step is not None:
            on_step(np.array(state.ids, int)[:batch, :, :n])
        if not goes_on:
            break
    return state


@partial(jax.jit, static_argnames=("structure", "kind", "capacity", "beam_size", "num_hypotheses"))
def _start(
    structure, leaves, source_ids, source_mask, is_sentence, start_id, kind, capacity, beam_size, num_hypotheses
):
    """Encode the source, and return the state before the first step."""
    model = _build(structure, leaves)
    cache = model.init_cache(source_ids, capacity, beam_size, source_mask)
    dtype = jnp.promote_types(cache.positions.dtype, jnp.float32)  # bfloat16 is too coarse to sum in
    return kind.start(model.config, cache, dtype, start_id, is_sentence, beam_size, num_hypotheses)


@partial(jax.jit, static_argnames="structure", donate_argnames="state")
def _advance(structure, leaves, state, numbers, last):
    """Take steps until ``last`` have been taken or all is said; say whether there is more to say."""
    model = _build(structure, leaves)
    state = jax.lax.while_loop(
        lambda state: state.goes_on() & (state.cache.length < last), lambda state: state.step(model, numbers), state
    )
    return state, state.goes_on()


def _build(structure, leaves):
    """Return the model in inference mode; the one that was taken apart stays as it is."""
    model = jax.tree.unflatten(structure, leaves)
    model.eval()
    return model


def _rounded_up(length, config):
    """Return a length that is compiled for."""
    bucket = -(-length // BUCKET) * BUCKET
    return bucket if config.max_positions is None else min(bucket, config.max_positions)


def _put(ids, tokens, n):
    """Write the n-th token of each hypothesis."""
    return jax.lax.dynamic_update_slice_in_dim(ids, tokens[:, :, None], n - 1, axis=2)


def _next_log_probabilities(logits, config, too_short):
    """Return the log-probability of each next token [R, V], with -inf for what may not be said."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    token = jnp.arange(logits.shape[1])
    forbidden = (token == config.pad_id) | (too_short & (token == config.eos_id))
    return jnp.where(forbidden, -jnp.inf, log_probabilities)
