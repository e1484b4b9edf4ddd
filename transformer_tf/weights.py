"""Canonical weights in and out of the model: a name is the path of the attribute that holds it."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import tensorflow as tf
from numpy import ndarray

from transformer_spec.names import Model, check_weights, find, parameter_shapes, rounded
from transformer_tf.embedding import OutputProjection
from transformer_tf.layers import LayerNorm

COMPUTES = keras.layers.Dense, keras.layers.Embedding, keras.layers.ReversibleEmbedding, LayerNorm, OutputProjection


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
        ValueError: A weight is computed from others, as by ``enable_lora``, or not used, as in a replaced layer.
    """
    found = _computed_with(model)
    for name, weight in found.items():
        if not isinstance(weight, keras.Variable):
            raise ValueError(
                f"{name} is not a parameter of its own: Keras adds a product of low rank to it. To merge "
                "them, load the exported weights into a new model"
            )
    return found


def _computed_with(model):
    """Return what the model computes with by canonical name: Keras' variables, or tensors computed from them.

    Raises:
        ValueError: A layer may compute with other weights, or a trainable parameter has no canonical name.
    """
    found = {}
    for name in parameter_shapes(model.config, model.part):
        path, _, attribute = keras_path(name).rpartition(".")
        layer = find(model, path)
        if type(layer) not in COMPUTES:
            raise ValueError(
                f"{path} is a {type(layer).__name__}, which may compute with other weights than {name}: replace it "
                "by a layer of transformer_tf that has the weights"
            )
        if layer.quantization_mode is not None:
            raise ValueError(
                f"{path} is quantized to {layer.quantization_mode}, which keeps no {name}: export and train the model "
                "before you call quantize"
            )
        found[name] = getattr(layer, attribute)
    named = set(map(id, found.values()))
    for variable in model.trainable_variables:
        if id(variable) not in named and "/lora_" not in variable.path:
            raise ValueError(f"{variable.path} has no canonical name: freeze it, or save the model with model.save")
    return found


def keras_path(name: str) -> str:
    """Return the attribute path of a parameter in Keras' layers, by canonical name."""
    path, _, attribute = name.rpartition(".")
    if attribute == "table":
        return f"{name}.embeddings"
    if path.endswith("norm"):
        return f"{path}.{'gamma' if attribute == 'scale' else 'beta'}"
    return "output_proj.linear.kernel" if name == "output_proj.kernel" else name
