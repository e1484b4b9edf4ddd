"""Search (Vaswani et al., 2017, section 6.1): greedy and beam, one token after another.

B batch, K beam size, N number of hypotheses, V target vocabulary, R = B * K rows of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by

from reference_numpy.search_plan import OnStep, SearchResult, plan_search, search_result
from transformer_torch.layers import Linear, laid_out_for_few_rows
from transformer_torch.transformer import Transformer

BLOCK = 32  # so many values are told by their largest whether to sort them


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
    config, device = model.config, model.device
    source_ids, source_mask = model._take_source(source_ids, source_mask)
    plan = plan_search(config, source_mask.cpu().numpy(), max_length, min_length, start_id)
    batch, limits = len(source_ids), torch.tensor(plan.limits, device=device)
    tokens = torch.full((batch,), plan.start_id, device=device)
    ids = torch.full((batch, 1, plan.capacity), config.pad_id, device=device)
    scores = torch.zeros(batch, dtype=_wide_dtype(model), device=device)
    unfinished = torch.ones(batch, dtype=torch.bool, device=device)
    with _inference(model), laid_out_for_few_rows(_step_weights(model), batch):
        cache = model.init_cache(source_ids, plan.capacity, source_mask=source_mask)
        for n in range(1, plan.capacity + 1):
            logits, cache = model.decode_step(tokens, cache)
            log_probabilities = _next_log_probabilities(logits, config, n < plan.min_length)  # [B, V]
            best, tokens = log_probabilities.max(-1)  # of equal ones, the first
            tokens = tokens.where(unfinished, config.pad_id)
            ids[:, 0, n - 1] = tokens
            scores += best.where(unfinished, 0.0)
            if on_step is not None:
                on_step(ids[:, :, :n].cpu().numpy().copy())
            unfinished &= (tokens != config.eos_id) & (n < limits)
            if not unfinished.any():
                break
    return search_result(ids.cpu().numpy(), scores[:, None].cpu().numpy(), config.pad_id)


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
    config, device = model.config, model.device
    source_ids, source_mask = model._take_source(source_ids, source_mask)
    plan = plan_search(
        config,
        source_mask.cpu().numpy(),
        max_length,
        min_length,
        start_id,
        beam_size,
        num_hypotheses,
        length_penalty,
        length_penalty_kind,
    )
    batch, vocabulary, dtype = len(source_ids), config.target_vocab_size, _wide_dtype(model)
    limits = torch.tensor(plan.limits, device=device)
    penalties = torch.tensor(plan.penalties, dtype=dtype, device=device)
    sentence = torch.arange(batch, device=device)[:, None]
    tokens = torch.full((batch, beam_size), plan.start_id, device=device)
    ids = torch.full((batch, beam_size, plan.capacity), config.pad_id, device=device)
    alive = torch.full((batch, beam_size), -torch.inf, dtype=dtype, device=device)  # log-probabilities; -inf: none
    alive[:, 0] = 0.0  # there is one to begin with: the empty one
    finished_ids = torch.full((batch, num_hypotheses, plan.capacity), config.pad_id, device=device)
    finished = torch.full((batch, num_hypotheses), -torch.inf, dtype=dtype, device=device)  # scores, best first
    with _inference(model), laid_out_for_few_rows(_step_weights(model), batch * beam_size):
        cache = model.init_cache(source_ids, plan.capacity, beam_size, source_mask)
        for n in range(1, plan.capacity + 1):
            # 1. Let each hypothesis go on in every way; twice the beam is enough, since each can end in one way only.
            logits, cache = model.decode_step(tokens.flatten(), cache)
            log_probabilities = _next_log_probabilities(logits, config, n < plan.min_length)
            totals = alive[:, :, None] + log_probabilities.view(batch, beam_size, vocabulary)  # [B, K, V]
            best, index = _top(totals.flatten(1), 2 * beam_size)  # [B, 2K]
            parent, token = index // vocabulary, index % vocabulary
            candidates = ids[sentence, parent]  # [B, 2K, capacity]
            candidates[:, :, n - 1] = token
            ends = (token == config.eos_id) | (limits == n)[:, None]
            # 2. Of those within the beam that end, keep the best.
            ended = (best / penalties[n]).where(ends, -torch.inf)[:, :beam_size]
            finished, rank = _top(torch.cat([finished, ended], 1), num_hypotheses)  # [B, N]
            finished_ids = torch.cat([finished_ids, candidates[:, :beam_size]], 1)[sentence, rank]
            # 3. Go on with the best that do not end, unless none of them can still be among the best.
            alive, rank = _top(best.where(~ends, -torch.inf), beam_size)  # [B, K]
            attainable = alive[:, 0] / penalties[limits]  # if all that it says from here on were certain
            alive[finished[:, -1] >= attainable] = -torch.inf
            ids, tokens = candidates[sentence, rank], token[sentence, rank]
            if on_step is not None:
                on_step(ids[:, :, :n].masked_fill(alive.isneginf()[:, :, None], config.pad_id).cpu().numpy())
            if alive.isneginf().all():
                break
            cache.reorder((sentence * beam_size + parent[sentence, rank]).flatten())
        finished_ids[finished.isneginf()] = config.pad_id
    return search_result(finished_ids.cpu().numpy(), finished.cpu().numpy(), config.pad_id)


@contextmanager
def _inference(model: Transformer) -> Iterator[None]:
    """Switch gradients and dropout off, and leave the model as it was."""
    was_training = {module: module.training for module in model.modules()}  # a part may be frozen
    try:
        with torch.inference_mode():
            model.eval()
            yield
    finally:
        for module, mode in was_training.items():
            module.training = mode


def _step_weights(model):
    """Return the weight of every module that multiplies in each step: not those that project the memory."""
    modules = (module for layer in model.decoder.layers for module in _step_modules(layer))
    return {
        **{module: module.weight for module in modules if isinstance(module, Linear)},  # and not quantised, say
        model.output_proj: model.output_proj.weight,
    }


def _step_modules(layer):
    of_self, of_cross, feed_forward = layer.self_attention, layer.cross_attention, layer.feed_forward
    yield from (of_self.query_proj, of_self.key_proj, of_self.value_proj, of_self.output_proj)
    yield from (of_cross.query_proj, of_cross.output_proj, feed_forward.inner_proj, feed_forward.output_proj)


def _wide_dtype(model):
    """Return the dtype to add log-probabilities in: bfloat16 is too coarse."""
    return torch.promote_types(model.source_embedding.table.dtype, torch.float32)


def _next_log_probabilities(logits, config, too_short):
    """Return the log-probability of each next token [R, V], with -inf for what may not be said."""
    log_probabilities = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
    log_probabilities[:, config.pad_id] = -torch.inf
    if too_short:
        log_probabilities[:, config.eos_id] = -torch.inf
    return log_probabilities


def _top(values, count):
    """Return the largest values of each row and where they are; of equal ones, the first come first."""
    if values.shape[1] <= BLOCK * count:
        best, index = values.sort(dim=-1, descending=True, stable=True)
        return best[:, :count], index[:, :count]
    # Sorting all is slow, and topk takes equal ones in any order. But what is looked for lies in few blocks: those with
    # the largest maxima, of equal ones the first.
    blocks = F.pad(values, (0, -values.shape[1] % BLOCK), value=-torch.inf).unflatten(1, (-1, BLOCK))
    _, block = _top(blocks.amax(-1), count)
    block = block.sort().values  # in their old order, so that the first of equal values stays the first
    best, at = _top(blocks.take_along_dim(block[:, :, None], 1).flatten(1), count)
    return best, block.gather(1, at // BLOCK) * BLOCK + at % BLOCK
