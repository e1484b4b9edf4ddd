"""Functions that set and return the weights of a model. The canonical name of a weight is its attribute path."""

from __future__ import annotations

from collections.abc import Mapping

from numpy import ndarray

from transformer_spec.checks import check_type
from transformer_spec.names import PARTS, Model, check_weights, find, parameter_shapes, rounded


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounding them to its dtype. The model never aliases the given arrays.

    Args:
        model: Model whose parameters are replaced in place.
        weights: One array per canonical parameter name, in any floating-point dtype. An ``Encoder`` ignores decoder
            parameters, and a ``Decoder`` ignores encoder parameters.

    Raises:
        TypeError: If a weight doesn't have a floating-point dtype, or an argument has the wrong type.
        ValueError: If the weights don't match the model's config or overflow its dtype.
    """
    check_type("model", model, Model)
    check_weights(model.config, weights, part=model.part)
    for name in parameter_shapes(model.config, model.part):
        parameter = find(model, name)
        parameter[...] = rounded(name, weights[name], parameter.dtype.name)


def get_weights(model: Model) -> dict[str, ndarray]:
    """Return a copy of every parameter of a model in the model's dtype, keyed by canonical name.

    Args:
        model: Model to read.

    Raises:
        TypeError: If ``model`` is not a model.
        ValueError: If the number of layers doesn't match the config.
    """
    check_type("model", model, Model)
    for stack in PARTS:
        layers, depth = getattr(model, stack, None), getattr(model.config, f"num_{stack}_layers")
        if layers is not None and len(layers.layers) != depth:
            raise ValueError(f"{stack}.layers must have {depth} layers, as in the config: got {len(layers.layers)}")
    return {name: find(model, name).copy() for name in parameter_shapes(model.config, model.part)}
