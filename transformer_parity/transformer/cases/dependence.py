"""Whether anything shows on a model: its logits must depend on the sentences, and on most weights.

A wrong port agrees on a model that returns the same logits whatever it is given. A config, or weights, can make one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from reference_numpy.training import gradients
from reference_numpy.transformer import Transformer
from transformer_parity.transformer.cases.inputs import token_ids, with_labels
from transformer_spec.config import TransformerConfig

LENGTHS = 5, 4  # of source and target: few, because a large vocabulary takes its time
VISIBLE = 1e-6  # relative change of the logits; the cases of our models have 0.1 and more
FELT = 1e-9  # effect of a weight on the loss, relative to the effect of the most effective weight


def why_nothing_shows(config: TransformerConfig, weights: Mapping[str, ndarray]) -> str:
    """Return why a comparison of a model would prove nothing; empty if the model depends on its inputs and weights.

    Args:
        config: The config of the model.
        weights: Its parameters by canonical name.
    """
    for side in ("source", "target"):
        if getattr(config, f"{side}_vocab_size") < 3:
            return f"{side}_vocab_size must be at least 3, for two tokens beside padding"
    ids = token_ids(config, *(min(length, config.max_positions or length) for length in LENGTHS))
    source_ids, target_ids = ids["source_ids"], ids["target_ids"]
    source_mask, target_mask = source_ids != config.pad_id, target_ids != config.pad_id
    with np.errstate(all="ignore"):
        model = Transformer.from_weights(config, weights, "float64", fast=False)
        logits = model(source_ids, target_ids)[target_mask]
        scale = np.abs(logits).max()
        for what, source, mask, target in (
            ("which tokens the source has", _others(source_ids, config), source_mask, target_ids),
            ("which tokens the target has", source_ids, source_mask, _others(target_ids, config)),
            ("the order of the source", source_ids[:, ::-1], source_mask[:, ::-1], target_ids),
            ("whether padding is masked", source_ids, np.ones_like(source_mask), target_ids),
        ):
            changed = model(source, target, source_mask=mask, target_mask=target_mask)[target_mask]
            if not np.abs(changed - logits).max() > VISIBLE * scale:
                return f"the logits do not depend on {what}, so that a wrong model agrees"
        found = gradients(model, **with_labels(ids, config)).parameters
    effects = {name: _norm(array) * max(_norm(weights[name]), 1.0) for name, array in found.items()}
    unfelt = [name for name, effect in effects.items() if not effect > FELT * max(effects.values())]
    if 2 * len(unfelt) > len(effects):
        return f"{len(unfelt)} of {len(effects)} weights do not change the loss, among them {unfelt[0]}"
    return ""


def _norm(array: ndarray) -> float:
    return float(np.linalg.norm(array))


def _others(ids: ndarray, config: TransformerConfig) -> ndarray:
    """Return the same sentences in other tokens."""
    tokens = [token for token in range(3) if token != config.pad_id]
    return np.where(ids == config.pad_id, ids, np.where(ids == tokens[0], tokens[1], tokens[0]))
