"""Canonical weights in and out of the model: a name is the path of the attribute that holds it."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import tensorflow as tf
from numpy import ndarray

from transformer_spec.names import Model, check_weights, find, parameter_shapes, rounded

KERAS_NAMES = {"scale": "gamma", "bias": "beta"}  # of a norm; everything else has the canonical name


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounded to its dtype; the caller's arrays are never aliased.

    Raises:
        TypeError: A weight is not of a floating-point dtype.
        ValueError: The weights are not those of the model's config, or overflow its dtype.
    """
    check_weights(model.config, weights, part=model.part)
    for name, parameter in parameters(model).items():
        parameter.assign(rounded(name, weights[name], parameter.dtype.name))


def get_weights(model: Model) -> dict[str, ndarray]:
    """Copy every parameter out of a model, in the model's dtype."""
    return {name: getattr(weight, "value", weight).numpy() for name, weight in _computed_with(model).items()}


def parameters(model: Model) -> dict[str, tf.Variable]:
    """Return the model's own parameters by canonical name, as TensorFlow's variables behind those of Keras."""
    return {name: variable.value for name, variable in variables(model).items()}


def variables(model: Model) -> dict[str, keras.Variable]:
    """Return the model's own parameters by canonical name, as Keras' variables, which know whether they are trained.

    Raises:
        ValueError: A weight is computed from others, as by ``enable_lora``.
    """
    found = _computed_with(model)
    for name, weight in found.items():
        if not isinstance(weight, keras.Variable):
            raise ValueError(f"{name} is not a parameter of its own: Keras adds a product of low rank to it")
    return found


def _computed_with(model):
    """Return what the model computes with by canonical name: Keras' variables, or tensors computed from others."""
    return {name: find(model, _keras_path(name)) for name in parameter_shapes(model.config, model.part)}


def _keras_path(name: str) -> str:
    path, _, attribute = name.rpartition(".")
    return f"{path}.{KERAS_NAMES[attribute]}" if path.endswith("norm") else name
