"""Rules that other libraries use to restrict the next tokens of a search. The paper's search has no such rules.

Axes: B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder, E
positions at which an n-gram can end.
"""

from __future__ import annotations

from math import inf
from typing import Any

import keras
import tensorflow as tf
from tensorflow import Tensor

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
        log_probabilities = tf.where(~_repeats(ids, n, plan, log_probabilities.shape[1]), log_probabilities, -inf)
    if rules.banned_ids:
        banned = tf.reduce_any(tf.range(log_probabilities.shape[1])[:, None] == list(rules.banned_ids), 1)
        log_probabilities = tf.where(~banned, log_probabilities, -inf)
    if plan.has_prefix:
        token = tf.repeat(plan.prefix[:, n - 1], keras.ops.shape(ids)[1])[:, None]  # [R, 1]
        alone = _alone(own, token, scored=rules.score_forced)
        log_probabilities = tf.where(token != plan.pad_id, alone, log_probabilities)
    if rules.at_limit != "cut":
        alone = _alone(own, plan.eos_id, scored=rules.at_limit == "scored")
        at_limit = tf.repeat(plan.limits == n, keras.ops.shape(ids)[1])[:, None]
        log_probabilities = tf.where(at_limit, alone, log_probabilities)
    return tf.nn.log_softmax(log_probabilities) if rules.renormalize else log_probabilities


def within_pool(values: Float[Tensor, "B X"], finished: Float[Tensor, "B P"]) -> Float[Tensor, "B X"]:
    """In each row, keep the first N finite values if the pool has N free entries. Replace later values with -inf."""
    left = tf.reduce_sum(tf.cast(finished == -inf, tf.int32), 1, keepdims=True)
    return tf.where(tf.cumsum(tf.cast(values != -inf, tf.int32), 1) <= left, values, -inf)


def _alone(log_probabilities, token, *, scored):
    """Return log-probabilities [R, V] that allow only one token.

    If ``scored`` is False, the log-probability of this token is 0.
    """
    is_token = tf.range(log_probabilities.shape[1]) == token
    return tf.where(is_token, log_probabilities if scored else tf.zeros_like(log_probabilities), -inf)


def _repeats(ids, n, plan, vocabulary):
    """Return a boolean array [R, V] that is True for tokens that would repeat an n-gram of the hypothesis."""
    size = plan.rules.no_repeat_ngram_size
    tokens = tf.reshape(ids, [-1, keras.ops.shape(ids)[2]])
    tokens = tf.concat([tf.fill(tf.shape(tokens[:, :1]), plan.start_id), tokens], 1)  # [R, capacity + 1]
    last = tokens[:, size - 1 :]  # [R, E]
    equal = tf.broadcast_to(tf.range(size - 1, keras.ops.shape(tokens)[1]) < n, tf.shape(last))
    for back in range(1, size):  # compare earlier tokens with the latest tokens
        equal = equal & (tokens[:, size - 1 - back : -back] == tf.gather(tokens, [tf.maximum(n - back, 0)], axis=1))
    rows = keras.ops.shape(tokens)[0]
    places = tf.stack([tf.broadcast_to(tf.range(rows)[:, None], tf.shape(last)), last], -1)
    count = tf.scatter_nd(places, tf.cast(equal, tf.int32), [rows, vocabulary])
    return count > 0
