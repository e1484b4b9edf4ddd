"""Imported models, and a check that they compute the same as other software."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from conftest import random_weights
from numpy import ndarray
from third_party import relative_error

import reference_numpy as ref
from transformer_parity.apps.checkpoints.imported import Imported, Origin
from transformer_spec.search import Search


def ours(config: ref.TransformerConfig, weights: Mapping[str, ndarray] | None = None) -> Imported:
    """Return one of this project's models in the form that can be exported, with random weights by default."""
    origin = Origin(format="ours", family="", preset="", files={})
    weights = random_weights(config) if weights is None else weights
    return Imported(config=config, weights=weights, vocabulary=None, search=Search(), origin=origin)


def logits_of(config: ref.TransformerConfig, weights: Mapping[str, ndarray], *ids: ndarray) -> ndarray:
    """Return the reference's float64 logits, ignoring weights that the config doesn't define."""
    kept = {name: weights[name] for name in ref.parameter_shapes(config)}
    return ref.Transformer.from_weights(config, kept, dtype="float64")(*ids)


def assert_only_this_computes_it(
    imported: Imported,
    ids: Iterable[ndarray],
    theirs: ndarray,
    others: Iterable[dict[str, Any]] = (),
    limits: tuple[float, float] = (1e-12, 1e-7),
) -> None:
    """Fail unless the model computes the given logits and, with any of the changed fields, different logits."""
    assert relative_error(logits_of(imported.config, imported.weights, *ids), theirs) <= limits[0]
    for change in others:
        config = imported.config.replace(**change)
        assert relative_error(logits_of(config, imported.weights, *ids), theirs) > limits[1], change
