"""The search loop: decode a position, choose the next tokens, and repeat until all sequences are finished."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.compilation import compiled, padded
from transformer_jax.transformer import Transformer
from transformer_spec.checks import check_ids, check_mask, to_array
from transformer_spec.search import OnStep, Search, SearchResult, search_result


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
    leaves, structure = jax.tree.flatten(model)  # JAX caches the compiled code per structure
    if any(isinstance(x, jax.core.Tracer) for x in (source_ids, source_mask, *leaves)):
        raise TypeError(
            "a search cannot run inside jax.jit or a similar transformation, because it compiles its own loop; call "
            "the search outside the transformation, or write the loop using init_cache and decode_step"
        )
    source_ids, source_mask = _take_source(model.config, source_ids, source_mask)
    plan = search.plan(model.config, source_mask)
    batch, last = len(source_ids), plan.capacity
    if model.fast:
        source_ids, source_mask, plan = padded(model, source_ids, source_mask, plan)
    dtype = jnp.promote_types(model.source_embedding.embedding.dtype, jnp.float32)  # bfloat16 is too imprecise for sums
    plan = plan.to(np.asarray, partial(np.asarray, dtype=dtype))
    sizes = {"beam_size": plan.beam_size, "pool_size": plan.pool_size}
    state, cache = _start(structure, leaves, source_ids, source_mask, plan, kind=kind, **sizes)
    for n in [last] if on_step is None else range(1, last + 1):
        state, cache, goes_on = _advance(structure, leaves, state, cache, plan, n)
        if on_step is not None:
            on_step(np.array(state.ids, int)[:batch, :, :n])
        if not goes_on:
            break
    ids, scores = state.best()
    found = search_result(np.array(ids, int)[:batch], np.array(scores)[:batch], plan.pad_id, plan.num_hypotheses)
    return found if as_numpy else found.cut_from(ids, scores)


@compiled(static_argnames=("structure", "kind", "beam_size", "pool_size"))
def _start(structure, leaves, source_ids, source_mask, plan, kind, beam_size, pool_size):
    """Encode the source. Return the state before the first step, and the cache."""
    model, plan = _build(structure, leaves), plan._replace(beam_size=beam_size, pool_size=pool_size)
    cache = model.init_cache(source_ids, plan.capacity, beam_size, source_mask)
    return kind.start(plan), cache


@compiled(static_argnames="structure", donate_argnames=("state", "cache"))
def _advance(structure, leaves, state, cache, plan, last):
    """Take steps up to ``last`` or until all sequences are finished. Also return whether any sequence is unfinished."""
    model = _build(structure, leaves)

    def step(carry):
        state, cache = carry
        logits, cache = model.decode_step(state.tokens.reshape(-1), cache)
        state, rows = state.step(logits, cache.length, plan)
        if rows is not None:
            cache.reorder(rows)
        return state, cache

    state, cache = jax.lax.while_loop(lambda carry: carry[0].goes_on() & (carry[1].length < last), step, (state, cache))
    return state, cache, state.goes_on()


def _build(structure, leaves):
    """Rebuild the model in inference mode, without changing the original."""
    model = jax.tree.unflatten(structure, leaves)
    model.eval()
    return model


def _take_source(config, ids, mask):
    """Check the source and return it as NumPy arrays. With JAX arrays, each check would be compiled for every shape."""
    ids = to_array("source_ids", ids)
    check_ids("source_ids", ids.shape, ids.dtype.name, config.source_vocab_size, config.max_positions, ids)
    mask = ids != config.pad_id if mask is None else to_array("source_mask", mask)
    check_mask("source_mask", mask.shape, mask.dtype.name, ids.shape)
    return ids.astype(np.int32), mask
