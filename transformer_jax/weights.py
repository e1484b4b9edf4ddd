"""Canonical weights in and out of the model: a name is the path of the attribute that holds it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from numpy import ndarray

from transformer_jax.parallel import to_numpy
from transformer_spec.names import Model, check_weights, find, parameter_shapes, rounded


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounded to its dtype; the caller's arrays are never aliased.

    Raises:
        TypeError: A weight is not of a floating-point dtype.
        ValueError: The weights are not those of the model's config, or overflow its dtype.
    """
    check_weights(model.config, weights, part=model.part)
    for name in parameter_shapes(model.config, model.part):
        parameter = find(model, name)
        # JAX may alias a NumPy array for as long as it lives: this copy is JAX's alone.
        array = rounded(name, weights[name], parameter.dtype.name)
        parameter.set_value(_put(array, parameter.get_value()))


def get_weights(model: Model) -> dict[str, ndarray]:
    """Copy every parameter out of a model, in the model's dtype."""
    return {name: to_numpy(find(model, name).get_value()) for name in parameter_shapes(model.config, model.part)}


def _put(array, old):
    """Put an array where the old one is, and bind it to that place if the old one is bound."""
    if isinstance(old, jax.ShapeDtypeStruct) or old.committed:  # a shape may be bound to a place too
        return jax.device_put(array, old.sharding)
    with jax.default_device(*old.devices()):
        return jax.device_put(array)
