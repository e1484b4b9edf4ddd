"""The search loop: decode a position, choose the next tokens, and repeat until all sequences are finished."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from transformer_spec.checks import check_logits
from transformer_spec.search import OnStep, Search, SearchResult, search_result
from transformer_torch.fast import decoding_twin, is_hooked
from transformer_torch.layers import inference
from transformer_torch.transformer import transformer_of
from transformer_torch.weights import is_divided


def run_search(
    kind: Any,
    model: Any,
    source_ids: Any,
    source_mask: Any,
    search: Search,
    on_step: OnStep | None,
    *,
    as_numpy: bool,
) -> SearchResult:
    """Run a search and return its result. ``kind`` is the class of the search state."""
    given, model = model, transformer_of(model)
    before = takewhile(lambda module: module is not model, given.modules())
    wrappers = [module for module in before if any(inner is model for inner in module.modules())]
    # Compile decode_step with the settings that the caller passed to torch.compile(model).
    compiled = next((wrapper.dynamo_ctx for wrapper in wrappers if hasattr(wrapper, "dynamo_ctx")), None)
    if model._compiled_call_impl is not None:
        warnings.warn("searches ignore model.compile(); pass torch.compile(model) instead", stacklevel=3)
    if is_hooked(model) or is_hooked(model.decoder):
        warnings.warn(
            "searches ignore hooks and replaced forward methods of the model and its decoder; "
            "hook or replace their layers, such as output_proj",
            stacklevel=3,
        )
    if any(
        module._forward_hooks or module._forward_pre_hooks or "decode_step" in dir(type(module)) for module in wrappers
    ):
        warnings.warn(
            "searches ignore hooks and decode_step methods of modules that wrap the model; "
            "hook or replace the model's layers, such as output_proj",
            stacklevel=3,
        )
    if is_divided(model):
        raise ValueError(
            "the model must not be sharded over a mesh; to search, load its export_weights() into a model on one device"
        )
    source_ids, source_mask = model._take("source", source_ids, source_mask)
    plan = search.plan(model.config, source_mask.cpu().numpy())
    device, dtype = model.device, torch.promote_types(model.dtype, torch.float32)  # bfloat16 is too imprecise for sums
    plan = plan.to(partial(torch.tensor, device=device), partial(torch.tensor, dtype=dtype, device=device))
    is_plain = not model.fast or compiled or "decode_step" in vars(model)
    with inference(model) if is_plain else decoding_twin(model, len(source_ids) * plan.beam_size) as decoder:
        decode_step = compiled(decoder.decode_step) if compiled else decoder.decode_step
        with torch.inference_mode():
            cache = decoder.init_cache(source_ids, plan.capacity, plan.beam_size, source_mask)
            state, rows = kind.start(plan), None
        for n in range(1, plan.capacity + 1):
            with torch.inference_mode():  # excludes ``on_step``, which may compute gradients
                if rows is not None:
                    cache.reorder(rows)
                logits, cache = decode_step(state.tokens.reshape(-1), cache)
                if n == 1:
                    check_logits((len(logits), 1, logits.shape[1]), (len(logits), 1), model.config.target_vocab_size)
                state, rows = state.step(logits, n, plan)
            if on_step is not None:
                on_step(state.ids[:, :, :n].cpu().numpy().copy())
            if not state.goes_on():
                break
    ids, scores = state.best()
    found = search_result(ids.cpu().numpy(), scores.cpu().numpy(), plan.pad_id, plan.num_hypotheses)
    # Clone the tensors, because autograd doesn't accept tensors from inference mode.
    return found if as_numpy else found.cut_from(ids.clone(), scores.clone())
