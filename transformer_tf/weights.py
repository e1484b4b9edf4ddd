"""Conversion of weights between canonical names and the variables of a Keras model."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import tensorflow as tf
from numpy import ndarray

from transformer_spec.names import Model, check_weights, find, parameter_shapes, rounded
from transformer_tf.embedding import OutputProjection
from transformer_tf.layers import LayerNorm, RMSNorm

COMPUTES = (
    *(keras.layers.Dense, keras.layers.Embedding, keras.layers.ReversibleEmbedding),
    *(LayerNorm, RMSNorm, OutputProjection),
)


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounding them to its dtype. The model never aliases the given arrays.

    Args:
        model: Model whose parameters are replaced in place.
        weights: One array per canonical parameter name, in any floating-point dtype. An ``Encoder`` ignores decoder
            parameters, and a ``Decoder`` ignores encoder parameters.

    Raises:
        TypeError: If a weight doesn't have a floating-point dtype.
        ValueError: If the weights don't match the model's config or overflow its dtype.
    """
    check_weights(model.config, weights, part=model.part)
    for name, parameter in parameters(model).items():
        parameter.assign(rounded(name, weights[name], parameter.dtype.name))


def get_weights(model: Model) -> dict[str, ndarray]:
    """Return a copy of every parameter of a model in the model's dtype, keyed by canonical name.

    If LoRA is enabled for a layer, the LoRA update is added to the kernel.

    Args:
        model: Model to read.

    Raises:
        ValueError: If a layer was replaced or quantized, or a trainable parameter has no canonical name.
    """
    return {name: getattr(weight, "value", weight).numpy() for name, weight in _computed_with(model).items()}


def parameters(model: Model) -> dict[str, tf.Variable]:
    """Return the TensorFlow variables inside the model's Keras variables, keyed by canonical name."""
    return {name: variable.value for name, variable in variables(model).items()}


def variables(model: Model) -> dict[str, keras.Variable]:
    """Return the model's Keras variables, which have a ``trainable`` attribute, keyed by canonical name.

    Raises:
        ValueError: If a weight is computed from other variables, for example after ``enable_lora``, or if a layer was
            replaced.
    """
    found = _computed_with(model)
    for name, weight in found.items():
        if not isinstance(weight, keras.Variable):
            raise ValueError(
                f"{name} must be a variable: got a sum that includes a LoRA update; to merge the update, load the "
                "exported weights into a new model"
            )
    return found


def check_variables(model: Model, known: Mapping[str, keras.Variable]) -> None:
    """Check that a model still uses the variables that it had when a ``Trainer`` was created for it.

    Raises:
        ValueError: If a layer was replaced, added, removed, or quantized, or LoRA was enabled.
    """
    changed = "the model's trainable variables have changed"
    try:
        found = variables(model)
    except ValueError as error:
        raise ValueError(f"{changed}: {error}; create a new Trainer") from error
    for name, variable in found.items():
        if variable is not known.get(name):
            raise ValueError(f"{changed}: {name} was replaced; create a new Trainer")


def _computed_with(model):
    """Return the weights that the model uses, keyed by canonical name: Keras variables or tensors computed from them.

    Raises:
        ValueError: If a layer belongs to a class that may use additional weights, or a trainable variable has no
            canonical name.
    """
    found = {}
    for name in parameter_shapes(model.config, model.part):
        path, _, attribute = keras_path(name).rpartition(".")
        layer = find(model, path)
        if type(layer) not in COMPUTES:
            raise ValueError(
                f"{path} must compute with {name} only: got a {type(layer).__name__}; replace it with a layer "
                "of transformer_tf that has the same weights"
            )
        if layer.quantization_mode is not None:
            raise ValueError(
                f"{path} is quantized to {layer.quantization_mode} and no longer has {name}: export and train the "
                "model before you call quantize"
            )
        found[name] = getattr(layer, attribute)
    named = set(map(id, found.values()))
    for variable in model.trainable_variables:
        if id(variable) not in named and "/lora_" not in variable.path:
            raise ValueError(
                f"{variable.path} has no canonical name because it was added or its layer was replaced; freeze the "
                "variable, or save the model with model.save"
            )
    return found


def keras_path(name: str) -> str:
    """Return the attribute path of the Keras variable with the given canonical name."""
    path, _, attribute = name.rpartition(".")
    if attribute == "table":
        return f"{name}.embeddings"
    if path.endswith("norm"):
        return f"{path}.{'gamma' if attribute == 'scale' else 'beta'}"
    return "output_proj.linear.kernel" if name == "output_proj.kernel" else name
