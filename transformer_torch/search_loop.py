"""The loop of a search: decode a position, let the search choose the next tokens, until all sentences have ended."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from transformer_spec.search import OnStep, Search, SearchResult, search_result
from transformer_torch import onednn
from transformer_torch.embedding import OutputProjection
from transformer_torch.layers import Linear
from transformer_torch.training import inference
from transformer_torch.transformer import Transformer
from transformer_torch.weights import is_divided

FEW_ROWS = 64  # rows: up to here, another layout does
# What multiplies the memory, once for a search.
MEMORY_PROJECTIONS = ("cross_attention.key_proj", "cross_attention.value_proj")


def run_search(
    kind: Any, model: Transformer, source_ids: Any, source_mask: Any, search: Search, on_step: OnStep | None
) -> SearchResult:
    """Return what a search finds, given the class that takes its steps."""
    if is_divided(model):
        raise ValueError("the model is divided over a mesh: what searches is another, made from its export_weights()")
    source_ids, source_mask = model._take("source", source_ids, source_mask)
    plan = search.plan(model.config, source_mask.cpu().numpy())
    device, dtype = model.device, model.source_embedding.table.dtype
    dtype = torch.promote_types(dtype, torch.float32)  # bfloat16 is too coarse to sum in
    plan = plan._replace(
        limits=torch.tensor(plan.limits, device=device),
        penalties=torch.tensor(plan.penalties, dtype=dtype, device=device),
    )
    with torch.inference_mode():
        decoder = _inference_twin(model)
        _lay_out_for_few_rows(decoder, len(source_ids) * plan.beam_size)
        cache = decoder.init_cache(source_ids, plan.capacity, plan.beam_size, source_mask)
        state, rows = kind.start(plan), None
    for n in range(1, plan.capacity + 1):
        with torch.inference_mode():  # not around ``on_step``, which may take gradients
            if rows is not None:
                cache.reorder(rows)
            logits, cache = decoder.decode_step(state.tokens.reshape(-1), cache)
            state, rows = state.step(logits, n, plan)
        if on_step is not None:
            on_step(state.ids[:, :, :n].cpu().numpy().copy())
        if not state.goes_on():
            break
    ids, scores = (x.cpu().numpy() for x in state.best())
    return search_result(ids, scores, plan.pad_id, plan.num_hypotheses)


def _inference_twin(module):
    """Return a module in inference mode with the same parameters and hooks, on which things can be set.

    The module itself may be in use elsewhere: another thread may train it. What torch.compile wraps runs without it. A
    ``forward`` that was set on a module may run the module itself, which is put into inference mode for that long: such
    a model must not be trained meanwhile.
    """
    if "_orig_mod" in module._modules:  # of torch.compile
        return _inference_twin(module._modules["_orig_mod"])
    twin = object.__new__(type(module))
    children = {name: None if child is None else _inference_twin(child) for name, child in module._modules.items()}
    # As attributes of its own too: nn.Module would look each of them up by a function, a twentieth of a small step.
    vars(twin).update({**vars(module), **module._parameters, **children})
    vars(twin).update({"_modules": children, "training": False, "_compiled_call_impl": None})
    if "forward" in vars(module):
        twin.forward = partial(_run_in_inference_mode, module)
    return twin


def _run_in_inference_mode(module, *args, **kwargs):
    with inference(module):
        return module.forward(*args, **kwargs)


def _lay_out_for_few_rows(model, rows):
    """Let what multiplies in each step do so by a copy of its weight in a layout that is quicker for few rows.

    A decoding step takes one row a hypothesis. Then the time goes into reading weights, and BLAS reads a transposed one
    badly: on a Xeon, a vocabulary of 37,000 takes half as long from oneDNN's own layout, and small matrices from
    [in, out] take two thirds. In bfloat16, oneDNN takes the products anyway, and would lay out the weights in each of
    them. Copies that are made for one search cannot be out of date.
    """
    weight = model.output_proj.weight
    if weight.device.type != "cpu" or (weight.dtype == torch.bfloat16 and not onednn.takes_bfloat16()):
        return
    if rows > FEW_ROWS or torch.is_autocast_enabled("cpu"):  # which does not know oneDNN's layout
        return
    for name, module in (*model.decoder.named_modules(), ("output_proj", model.output_proj)):
        if (
            type(module) in (Linear, OutputProjection)
            and "forward" not in vars(module)
            and not name.endswith(MEMORY_PROJECTIONS)
        ):
            module.forward = onednn.for_few_rows(module.weight, module.bias, rows)
