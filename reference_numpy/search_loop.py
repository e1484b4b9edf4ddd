"""The search loop: decode a position, choose the next tokens, and repeat until all sequences are finished."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from reference_numpy.transformer import Transformer, check_model
from transformer_spec.search import OnStep, Search, SearchResult, search_result


def run_search(
    kind: Any,
    model: Transformer,
    source_ids: Any,
    source_mask: Any,
    search: Search,
    on_step: OnStep | None,
    *,
    use_cache: bool,
) -> SearchResult:
    """Run a search and return its result. ``kind`` is the class of the search state."""
    check_model(model)
    source_ids, source_mask = model._take("source", source_ids, source_mask)
    plan = search.plan(model.config, source_mask)
    plan = plan.to(np.asarray, partial(np.asarray, dtype=model.source_embedding.table.dtype))
    decoder = model if use_cache else _Uncached(model)
    cache = decoder.init_cache(source_ids, plan.capacity, plan.beam_size, source_mask)
    state, rows = kind.start(plan), None
    for n in range(1, plan.capacity + 1):
        if rows is not None:
            cache.reorder(rows)
        logits, cache = decoder.decode_step(state.tokens.reshape(-1), cache)
        state, rows = state.step(logits, n, plan)
        if on_step is not None:
            on_step(state.ids[:, :, :n].copy())
        if not state.goes_on():
            break
    ids, scores = state.best()
    return search_result(ids, scores, plan.pad_id, plan.num_hypotheses)


class _Uncached:
    """Decoder without a cache, which recomputes the full prefix in each step. Tests use it to verify the cache."""

    def __init__(self, model):
        self.model = model

    def init_cache(self, source_ids, capacity, beam_size, source_mask):
        """Encode the source and create an empty prefix. This search stores the prefix instead of a cache."""
        self.source_ids, self.source_mask = source_ids.repeat(beam_size, 0), source_mask.repeat(beam_size, 0)
        self.memory = self.model.encode(source_ids, source_mask).repeat(beam_size, 0)  # [R, S, d_model]
        self.prefix = np.zeros((len(self.memory), 0), int)  # [R, n]
        return self

    def decode_step(self, target_ids, cache):
        """Append a token to each row and return the logits of the next tokens [R, V]."""
        self.prefix = np.concatenate([self.prefix, target_ids[:, None]], 1)
        logits = self.model.decode(self.prefix, self.memory, self.source_ids, source_mask=self.source_mask)
        return logits[:, -1], cache

    def reorder(self, rows):
        """Replace the prefix in row i with the prefix in row ``rows[i]``."""
        self.prefix = self.prefix[rows]
