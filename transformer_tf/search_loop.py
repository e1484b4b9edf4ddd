"""The loop of a search: decode a position, let the search choose the next tokens, until all sentences have ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, proxy

import keras
import numpy as np
import tensorflow as tf

from transformer_spec.search import OnStep, Search, SearchResult, pad_search, power_of_two, search_result
from transformer_tf.runtime import placed
from transformer_tf.transformer import Transformer


def run_search(
    kind: Any, model: Transformer, source_ids: Any, source_mask: Any, search: Search, on_step: OnStep | None
) -> SearchResult:
    """Return what a search finds, given the class that takes its steps."""
    with placed(model.device):
        source_ids, source_mask = (x.numpy() for x in model._take("source", source_ids, source_mask))
    plan = search.plan(model.config, source_mask)
    batch, last = len(source_ids), plan.capacity
    source_ids, source_mask, plan = pad_search(source_ids, source_mask, plan, model.config.max_positions, _rounded_up)
    dtype = keras.backend.result_type(model.compute_dtype, "float32")  # bfloat16 is too coarse to sum in
    with placed(model.device):
        limits, penalties = tf.constant(plan.limits, tf.int32), tf.constant(plan.penalties, dtype)
        plan = plan._replace(limits=limits, penalties=penalties)
        state = kind.start(plan)
    arrays = plan._replace(rules=())  # type: ignore[arg-type]  # no arrays: what is compiled depends on rules
    cache = _call(Transformer.init_cache, model, source_ids, plan.capacity, plan.beam_size, source_mask)
    for n in [last] if on_step is None else range(1, last + 1):
        state, cache = _call(_advance, model, state, cache, arrays, n, rules=plan.rules)
        if on_step is not None:
            on_step(np.array(state.ids[:batch, :, :n], np.int64))
        if not state.goes_on():
            break
    ids, scores = state.best()
    return search_result(np.array(ids[:batch], np.int64), np.array(scores[:batch]), plan.pad_id, plan.num_hypotheses)


def _advance(model, state, cache, arrays, last, rules):
    """Take steps until ``last`` have been taken or all sentences have ended."""
    plan = arrays._replace(rules=rules)

    def step(state, cache):
        logits, cache = model.decode_step(tf.reshape(state.tokens, [-1]), cache)
        state, rows = state.step(logits, cache.length, plan)
        if rows is not None:
            cache.reorder(rows)
        return state, cache

    return tf.while_loop(lambda state, cache: state.goes_on() & (cache.length < last), step, (state, cache))


def _rounded_up(length):
    """Return a length that is compiled for: XLA takes seconds for each, and makes a step several times as fast."""
    return max(32, power_of_two(length))


# What has been traced, for as long as its model lives. Not in the model, which Keras saves and copies.
_TRACED: WeakKeyDictionary[Transformer, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()


def _call(function, model, *args, **static):
    """Call a function of a model, tensors and numbers, traced once for all of them; and again for what is static."""
    traced = _TRACED.setdefault(model, {})
    with placed(model.device):
        args = tf.nest.map_structure(tf.convert_to_tensor, args)
        # Among the types is the kind of search. Variables change where Keras adds some, such as of LoRA.
        key = function, *static.values(), *map(type, args), *map(id, model.variables)
        if key not in traced:
            of_model = partial(function, proxy(model), **static)  # a model would live as long as its functions
            signature = tf.nest.map_structure(lambda x: tf.TensorSpec([None] * x.shape.rank, x.dtype), args)
            traced[key] = tf.function(of_model, signature, autograph=False, jit_compile=function is _advance)
        return traced[key](*args)
