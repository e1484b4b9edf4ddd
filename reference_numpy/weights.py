"""Canonical weights in and out of the model: a name is the path of the attribute that holds it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from reference_numpy.config import TransformerConfig
from reference_numpy.names import Model, check_weights, find, parameter_shapes, rounded


def init_weights(config: TransformerConfig, seed: int = 0) -> dict[str, ndarray]:
    """Draw initial weights in float32: the same numbers for every backend.

    Kernels are Xavier uniform (Glorot and Bengio, 2010), tables normal with variance 1 / d_model, biases zero and
    scales one.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        kind = name.rpartition(".")[2]
        if kind == "kernel":
            limit = np.sqrt(6.0 / sum(shape))
            weights[name] = rng.uniform(-limit, limit, shape).astype(np.float32)
        elif kind == "table":
            weights[name] = rng.normal(0.0, config.d_model**-0.5, shape).astype(np.float32)
        else:
            weights[name] = np.full(shape, 1.0 if kind == "scale" else 0.0, np.float32)
    return weights


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounded to its dtype; the caller's arrays are never aliased.

    Raises:
        TypeError: A weight is not of a floating-point dtype.
        ValueError: The weights are not those of the model's config, or overflow its dtype.
    """
    check_weights(model.config, weights, part=model.part)
    for name in parameter_shapes(model.config, model.part):
        parameter = find(model, name)
        parameter[...] = rounded(name, weights[name], parameter.dtype.name)


def get_weights(model: Model) -> dict[str, ndarray]:
    """Copy every parameter out of a model, in the model's dtype."""
    return {name: find(model, name).copy() for name in parameter_shapes(model.config, model.part)}
