"""A padding token for models whose original programs have none. An import appends it, and an export removes it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from transformer_spec.config import TransformerConfig

NEVER = -1e4  # output bias of tokens that must never be generated; it fits in float16 and makes their probability 0
OF_VOCABULARY = {  # parameters that have a vocabulary axis, with the index of this axis
    "source_embedding.table": 0,
    "target_embedding.table": 0,
    "output_proj.kernel": 1,
    "output_proj.bias": 0,
}


def append_padding(
    config: TransformerConfig, weights: Mapping[str, ndarray]
) -> tuple[TransformerConfig, dict[str, ndarray]]:
    """Append a token with a zero embedding to both vocabularies. It serves as the padding and BOS token.

    The token has the same ID in both vocabularies. If the vocabularies have different sizes, the smaller vocabulary is
    first extended to the size of the larger one. The output bias of the appended tokens ensures that they are never
    generated, so the log-probabilities of all other tokens match the original program's.
    """
    pad_id, size = max(config.source_vocab_size, config.target_vocab_size), config.target_vocab_size
    table = weights["source_embedding.table"]
    padded = {**weights, "output_proj.bias": weights.get("output_proj.bias", np.zeros(size, table.dtype))}
    for name, axis in OF_VOCABULARY.items():
        if name in padded:
            more = pad_id + 1 - padded[name].shape[axis]
            padded[name] = np.pad(padded[name], [(0, more * (i == axis)) for i in range(padded[name].ndim)])
    padded["output_proj.bias"][size:] = NEVER
    sizes = {f"{side}_vocab_size": pad_id + 1 for side in ("source", "target")}
    return config.replace(**sizes, pad_id=pad_id, bos_id=pad_id, output_bias=True), padded


def strip_padding(
    config: TransformerConfig, weights: Mapping[str, ndarray]
) -> tuple[TransformerConfig, dict[str, ndarray]]:
    """Remove the tokens that ``append_padding`` appended. If there are none, return the model unchanged."""
    source = weights["source_embedding.table"]
    bias = weights.get("output_proj.bias", np.zeros(config.target_vocab_size, source.dtype))
    last = {config.source_vocab_size - 1, config.target_vocab_size - 1}
    if last != {config.pad_id} or bias[config.pad_id] != NEVER:
        return config, dict(weights)
    sizes = {"source": config.pad_id, "target": int((bias != NEVER).sum())}
    if config.tie_embeddings != "all" and sizes["target"] == config.pad_id:
        sizes["source"] = int(np.flatnonzero(source.any(axis=1)).max(initial=0)) + 1
    stripped = dict(weights)
    for name, axis in OF_VOCABULARY.items():
        if name in stripped:
            size = sizes["source" if name.startswith("source") else "target"]
            stripped[name] = stripped[name][:size] if axis == 0 else stripped[name][:, :size]
    has_bias = bool(stripped["output_proj.bias"].any())
    if not has_bias:
        del stripped["output_proj.bias"]
    start = 0 if config.bos_id == config.pad_id else config.bos_id
    without = {"pad_id": 0, "bos_id": start, "output_bias": has_bias}
    return config.replace(**without, **{f"{side}_vocab_size": size for side, size in sizes.items()}), stripped


def target_table(weights: Mapping[str, ndarray]) -> ndarray:
    """Return the embedding matrix of the target."""
    return weights.get("target_embedding.table", weights["source_embedding.table"])
