"""The search loop: decode a position, choose the next tokens, and repeat until all sequences are finished."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from transformer_spec.search import OnStep, Search, SearchResult, search_result
from transformer_tf.compilation import call_traced, padded
from transformer_tf.runtime import placed
from transformer_tf.transformer import Transformer


def run_search(
    kind: Any,
    model: Transformer,
    source_ids: Any,
    source_mask: Any,
    search: Search,
    on_step: OnStep | None,
    *,
    as_numpy: bool,
) -> SearchResult:
    """Run a search and return its result. ``kind`` is the class of the search state."""
    with placed(model.device):
        source_ids, source_mask = (x.numpy() for x in model._take("source", source_ids, source_mask))
    plan = search.plan(model.config, source_mask)
    batch, last = len(source_ids), plan.capacity
    if model.fast:
        source_ids, source_mask, plan = padded(model, source_ids, source_mask, plan)
    dtype = keras.backend.result_type(model.compute_dtype, "float32")  # bfloat16 is too imprecise for sums
    with placed(model.device):
        plan = plan.to(partial(tf.constant, dtype=tf.int32), partial(tf.constant, dtype=dtype))
        state = kind.start(plan)
    arrays = plan._replace(rules=())  # type: ignore[arg-type]  # rules are constants, not tensors
    cache = call_traced(Transformer.init_cache, model, source_ids, plan.capacity, plan.beam_size, source_mask)
    for n in [last] if on_step is None else range(1, last + 1):
        state, cache = call_traced(_advance, model, state, cache, arrays, n, by_xla=True, rules=plan.rules)
        if on_step is not None:
            on_step(np.array(state.ids[:batch, :, :n], np.int64))
        if not state.goes_on():
            break
    ids, scores = state.best()
    array, scores_array = np.array(ids[:batch], np.int64), np.array(scores[:batch])
    found = search_result(array, scores_array, plan.pad_id, plan.num_hypotheses)
    return found if as_numpy else found.cut_from(ids, scores)


def _advance(model, state, cache, arrays, last, rules):
    """Take steps up to step ``last``, or until all sequences are finished."""
    plan = arrays._replace(rules=rules)

    def step(state, cache):
        logits, cache = model.decode_step(tf.reshape(state.tokens, [-1]), cache)
        state, rows = state.step(logits, cache.length, plan)
        if rows is not None:
            cache.reorder(rows)
        return state, cache

    return tf.while_loop(lambda state, cache: state.goes_on() & (cache.length < last), step, (state, cache))
