"""Canonical weights in and out of the model: a name is the path of the attribute that holds it."""

from __future__ import annotations

from collections.abc import Mapping

from numpy import ndarray

from transformer_spec.checks import check_type
from transformer_spec.names import PARTS, Model, check_weights, find, parameter_shapes, rounded


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounded to its dtype; the caller's arrays are never aliased.

    Raises:
        TypeError: A weight is not of a floating-point dtype, or an argument is something else.
        ValueError: The weights are not those of the model's config, or overflow its dtype.
    """
    check_type("model", model, Model)
    check_weights(model.config, weights, part=model.part)
    for name in parameter_shapes(model.config, model.part):
        parameter = find(model, name)
        parameter[...] = rounded(name, weights[name], parameter.dtype.name)


def get_weights(model: Model) -> dict[str, ndarray]:
    """Copy every parameter out of a model, in its dtype; ValueError if its config has more or fewer layers."""
    check_type("model", model, Model)
    for stack in PARTS:
        layers, depth = getattr(model, stack, None), getattr(model.config, f"num_{stack}_layers")
        if layers is not None and len(layers.layers) != depth:
            raise ValueError(f"{stack}.layers must have {depth} layers, as the config says: got {len(layers.layers)}")
    return {name: find(model, name).copy() for name in parameter_shapes(model.config, model.part)}
