"""Search (Vaswani et al., 2017, section 6.1): greedy and beam, one token after another.

B batch, K beam size, N number of hypotheses, V target vocabulary, R = B * K rows of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, proxy

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from reference_numpy.search_plan import OnStep, SearchResult, plan_search, search_result
from transformer_tf.decoder import DecoderCache
from transformer_tf.runtime import placed
from transformer_tf.transformer import Transformer


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
    source_ids, source_mask = model._take_source(source_ids, source_mask)
    plan = plan_search(config, source_mask.numpy(), max_length, min_length, start_id)
    cache, limits = _start(model, source_ids, source_mask, plan)
    rows, _, _, capacity = cache.self_mask.shape
    state = _Greedy(
        cache,
        tokens=np.full(rows, plan.start_id, np.int32),
        ids=np.full((rows, 1, capacity), config.pad_id, np.int32),
        scores=np.zeros((rows, 1), _wide(model.compute_dtype)),
        unfinished=limits > 0,
    )
    state = _search(model, _greedy_loop, state, (limits, plan.min_length), plan, on_step)
    ids, scores = _to_numpy(plan, state.ids, state.scores)
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
    source_ids, source_mask = model._take_source(source_ids, source_mask)
    plan = plan_search(
        config,
        source_mask.numpy(),
        max_length,
        min_length,
        start_id,
        beam_size,
        num_hypotheses,
        length_penalty,
        length_penalty_kind,
    )
    cache, limits = _start(model, source_ids, source_mask, plan, beam_size)
    sentences, capacity, dtype = len(limits), cache.self_mask.shape[3], _wide(model.compute_dtype)
    penalties = np.pad(plan.penalties, (0, capacity - plan.capacity), constant_values=1.0).astype(dtype)
    alive = np.full((sentences, beam_size), -np.inf, dtype)  # log-probabilities; -inf is no hypothesis
    alive[limits > 0, 0] = 0.0  # there is one to begin with: the empty one
    state = _Beam(
        cache,
        tokens=np.full((sentences, beam_size), plan.start_id, np.int32),
        ids=np.full((sentences, beam_size, capacity), config.pad_id, np.int32),
        alive=alive,
        finished_ids=np.full((sentences, num_hypotheses, capacity), config.pad_id, np.int32),
        finished=np.full((sentences, num_hypotheses), -np.inf, dtype),  # scores, best first
    )
    state = _search(model, _beam_loop, state, (limits, plan.min_length, penalties), plan, on_step)
    finished_ids, finished = _to_numpy(plan, state.finished_ids, state.finished)
    finished_ids[np.isneginf(finished)] = config.pad_id
    return search_result(finished_ids, finished, config.pad_id)


class _Greedy(NamedTuple):
    """How far a greedy search has come."""

    cache: DecoderCache
    tokens: Tensor
    ids: Tensor
    scores: Tensor
    unfinished: Tensor


def _greedy_step(model, state, limits, min_length):
    """Let every unfinished sentence say one more token."""
    config = model.config
    logits, cache = model.decode_step(state.tokens, state.cache)
    n = cache.length
    log_probabilities = _next_log_probabilities(logits, config, n < min_length)  # [B, V]
    tokens = tf.where(state.unfinished, tf.argmax(log_probabilities, -1, tf.int32), config.pad_id)
    ids = keras.ops.slice_update(state.ids, [0, 0, n - 1], tokens[:, None, None])
    best = tf.reduce_max(log_probabilities, -1, keepdims=True)
    scores = tf.where(state.unfinished[:, None], state.scores + best, state.scores)
    unfinished = state.unfinished & (tokens != config.eos_id) & (n < limits)
    return _Greedy(cache, tokens, ids, scores, unfinished)


class _Beam(NamedTuple):
    """How far a beam search has come."""

    cache: DecoderCache
    tokens: Tensor
    ids: Tensor
    alive: Tensor
    finished_ids: Tensor
    finished: Tensor

    @property
    def unfinished(self):
        return self.alive != -math.inf


def _beam_step(model, state, limits, min_length, penalties):
    """Let every unfinished hypothesis say one more token, and keep the best."""
    config = model.config
    vocabulary, num_hypotheses = config.target_vocab_size, keras.ops.shape(state.finished)[1]
    batch, beam_size = keras.ops.shape(state.alive)
    none = tf.constant(-math.inf, state.alive.dtype)
    # 1. Let each hypothesis go on in every way; twice the beam is enough, since each can end in one way only.
    logits, cache = model.decode_step(tf.reshape(state.tokens, [-1]), state.cache)
    n = cache.length
    log_probabilities = _next_log_probabilities(logits, config, n < min_length)
    totals = state.alive[:, :, None] + tf.reshape(log_probabilities, [batch, beam_size, vocabulary])  # [B, K, V]
    best, index = tf.math.top_k(tf.reshape(totals, [batch, -1]), 2 * beam_size)  # [B, 2K]
    parent, token = index // vocabulary, index % vocabulary
    candidates = tf.gather(state.ids, parent, batch_dims=1)  # [B, 2K, capacity]
    candidates = keras.ops.slice_update(candidates, [0, 0, n - 1], token[:, :, None])
    ends = (token == config.eos_id) | (limits == n)[:, None]
    # 2. Of those within the beam that end, keep the best.
    ended = tf.where(ends, best / penalties[n], none)[:, :beam_size]
    finished, rank = tf.math.top_k(tf.concat([state.finished, ended], 1), num_hypotheses)  # [B, N]
    finished_ids = tf.gather(tf.concat([state.finished_ids, candidates[:, :beam_size]], 1), rank, batch_dims=1)
    # 3. Go on with the best that do not end, unless none of them can still be among the best.
    alive, rank = tf.math.top_k(tf.where(ends, none, best), beam_size)  # [B, K]
    attainable = alive[:, 0] / tf.gather(penalties, limits)  # if all that it says from here on were certain
    alive = tf.where((finished[:, -1] >= attainable)[:, None], none, alive)
    ids, tokens, parent = (tf.gather(x, rank, batch_dims=1) for x in (candidates, token, parent))
    ids = tf.where((alive == none)[:, :, None], config.pad_id, ids)
    cache.reorder(tf.reshape(tf.range(batch)[:, None] * beam_size + parent, [-1]))
    return _Beam(cache, tokens, ids, alive, finished_ids, finished)


def _next_log_probabilities(logits, config, too_short):
    """Return the log-probability of each next token [R, V], with -inf for what may not be said."""
    log_probabilities = tf.nn.log_softmax(tf.cast(logits, _wide(logits.dtype)))
    ids = tf.range(config.target_vocab_size)
    unsayable = (ids == config.pad_id) | ((ids == config.eos_id) & too_short)
    return tf.where(unsayable, tf.constant(-math.inf, log_probabilities.dtype), log_probabilities)


def _wide(dtype):
    """Return the dtype to add log-probabilities in: bfloat16 is too coarse."""
    return keras.backend.result_type(dtype, "float32")


# XLA compiles a loop anew for each size of its arrays, which takes seconds, and makes a step several times as fast. So
# there are few sizes, and whatever is larger than what was asked for is padding.


def _start(model, source_ids, source_mask, plan, beam_size=1):
    """Return an empty cache, and the most tokens of each sentence: none where there is no sentence but padding."""
    config = model.config
    batch, length = source_ids.shape
    more = (0, _power_of_two(batch) - batch)
    padding = (more, (0, _room(length, config.max_positions) - length))
    source_ids = np.pad(source_ids, padding, constant_values=config.pad_id)
    source_mask = np.pad(source_mask, padding)
    capacity = _room(plan.capacity, config.max_positions)
    cache = _call(Transformer.init_cache, model, source_ids, capacity, beam_size, source_mask)
    return cache, np.pad(plan.limits.astype(np.int32), more)


def _room(length, max_positions):
    """Return what is large enough for a length, and for most others."""
    room = max(_power_of_two(length), 32)
    return room if max_positions is None else min(room, max_positions)


def _power_of_two(number):
    """Return the least power of two that is large enough."""
    return 1 << (number - 1).bit_length()


def _search(model, loop, state, limits, plan, on_step):
    """Take all steps: at once, unless each is to be shown."""
    for last in range(plan.capacity if on_step is None else 1, plan.capacity + 1):
        state = _call(loop, model, state, last, *limits, jit_compile=True)
        if on_step is not None:
            ids, _ = _to_numpy(plan, state.ids, state.unfinished)
            on_step(ids[:, :, :last])
        if not state.unfinished.numpy().any():
            break
    return state


def _loop(step, model, state, last, *limits):
    """Take one step after another, up to the last one, or until everything is finished."""
    (state,) = tf.while_loop(
        lambda state: tf.reduce_any(state.unfinished) & (state.cache.length < last),
        lambda state: (step(model, state, *limits),),
        (state,),
    )
    return state


_greedy_loop = partial(_loop, _greedy_step)
_beam_loop = partial(_loop, _beam_step)

# What has been traced, for as long as its model lives. Not in the model, which Keras saves and copies.
_TRACED: WeakKeyDictionary[Transformer, dict[Callable[..., Any], Callable[..., Any]]] = WeakKeyDictionary()


def _call(function, model, *args, jit_compile=False):
    """Call a function of a model, tensors and numbers, traced once for all of them."""
    traced = _TRACED.setdefault(model, {})
    with placed(model.device):
        args = tf.nest.map_structure(lambda x: x if isinstance(x, int) else tf.convert_to_tensor(x), args)
        if function not in traced:
            of_model = partial(function, proxy(model))  # which would otherwise live as long as its functions
            signature = tf.nest.map_structure(_of_any_length, args)
            traced[function] = tf.function(of_model, signature, autograph=False, jit_compile=jit_compile)
        return traced[function](*args)


def _of_any_length(x):
    x = tf.convert_to_tensor(x)
    return tf.TensorSpec([None] * x.shape.rank, x.dtype)


def _to_numpy(plan, ids, scores):
    """Return what there is of the sentences asked for."""
    batch = len(plan.limits)
    return np.array(ids[:batch], np.int64), np.array(scores[:batch])
