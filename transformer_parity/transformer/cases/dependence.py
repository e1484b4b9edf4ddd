"""Check that a model is suitable for comparisons: its logits must depend on the inputs and on most weights.

With some configs and weights, the logits are the same for all inputs. For such a model, even a port with bugs agrees
with the reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from reference_numpy.training import gradients
from reference_numpy.transformer import Transformer
from transformer_parity.transformer.cases.inputs import token_ids, with_labels
from transformer_spec.config import TransformerConfig

LENGTHS = 5, 4  # source and target lengths; kept short because large vocabularies are slow
VISIBLE = 1e-6  # minimum relative change of the logits; in the standard cases, the logits change by at least 10%
FELT = 1e-9  # minimum effect of a weight on the loss, relative to the weight with the largest effect


def why_nothing_shows(config: TransformerConfig, weights: Mapping[str, ndarray]) -> str:
    """Return the reason why a comparison with this model would be meaningless, or an empty string.

    A comparison is meaningful if the logits depend on the inputs and on most weights.

    Args:
        config: Config of the model.
        weights: Parameters of the model, one array per canonical name.
    """
    for side in ("source", "target"):
        if getattr(config, f"{side}_vocab_size") < 3:
            return f"{side}_vocab_size must be at least 3, because the cases need padding and two other tokens"
    ids = token_ids(config, *(min(length, config.max_positions or length) for length in LENGTHS))
    source_ids, target_ids = ids["source_ids"], ids["target_ids"]
    source_mask, target_mask = source_ids != config.pad_id, target_ids != config.pad_id
    with np.errstate(all="ignore"):
        model = Transformer.from_weights(config, weights, "float64", fast=False)
        logits = model(source_ids, target_ids)[target_mask]
        scale = np.abs(logits).max()
        for what, source, mask, target in (
            ("the source tokens", _others(source_ids, config), source_mask, target_ids),
            ("the target tokens", source_ids, source_mask, _others(target_ids, config)),
            ("the order of the source tokens", source_ids[:, ::-1], source_mask[:, ::-1], target_ids),
            ("the padding mask", source_ids, np.ones_like(source_mask), target_ids),
        ):
            changed = model(source, target, source_mask=mask, target_mask=target_mask)[target_mask]
            if not np.abs(changed - logits).max() > VISIBLE * scale:
                return f"the logits do not depend on {what}, so the comparison could not detect a wrong model"
        found = gradients(model, **with_labels(ids, config)).parameters
    effects = {name: _norm(array) * max(_norm(weights[name]), 1.0) for name, array in found.items()}
    unfelt = [name for name, effect in effects.items() if not effect > FELT * max(effects.values())]
    if 2 * len(unfelt) > len(effects):
        return f"{len(unfelt)} of {len(effects)} weights do not affect the loss, including {unfelt[0]}"
    return ""


def _norm(array: ndarray) -> float:
    return float(np.linalg.norm(array))


def _others(ids: ndarray, config: TransformerConfig) -> ndarray:
    """Return the same sequences with every token except padding replaced by a different token."""
    tokens = [token for token in range(3) if token != config.pad_id]
    return np.where(ids == config.pad_id, ids, np.where(ids == tokens[0], tokens[1], tokens[0]))
