"""Canonical weights in and out of the model: a name is the path of the attribute that holds it.

``kernel`` is [in, out] everywhere but in torch, whose ``weight`` is [out, in]: only this file transposes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from numpy import ndarray

from reference_numpy.names import check_weights, parameter_shapes, rounded

if TYPE_CHECKING:
    from transformer_torch.transformer import Transformer

TORCH_NAMES = {"kernel": "weight", "scale": "weight", "bias": "bias", "table": "table"}


def set_weights(model: Transformer, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounded to its dtype; the caller's arrays are never aliased.

    Raises:
        TypeError: A weight is not of a floating-point dtype.
        ValueError: The weights are not those of the model's config, or overflow its dtype.
    """
    check_weights(model.config, weights)
    with torch.no_grad():
        for name in parameter_shapes(model.config):
            parameter = find(model, _torch_path(name))
            array = rounded(name, weights[name], str(parameter.dtype).removeprefix("torch."))
            tensor = torch.from_numpy(_as_torch_bits(array))
            parameter.copy_((tensor.T if name.endswith("kernel") else tensor).view(parameter.dtype))


def get_weights(model: Transformer) -> dict[str, ndarray]:
    """Copy every parameter out of a model, in the model's dtype."""
    weights = {}
    for name in parameter_shapes(model.config):
        tensor = find(model, _torch_path(name)).detach().cpu()
        tensor = (tensor.T if name.endswith("kernel") else tensor).contiguous()
        if tensor.dtype == torch.bfloat16:  # which Tensor.numpy refuses
            weights[name] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        else:
            weights[name] = tensor.numpy().copy()
    return weights


def find(model: Any, path: str) -> Any:
    """Return the attribute of a model that a dotted path leads to."""

    def step(owner: Any, key: str) -> Any:
        return owner[int(key)] if key.isdecimal() else getattr(owner, key)

    return reduce(step, path.split("."), model)


def _torch_path(name: str) -> str:
    path, _, attribute = name.rpartition(".")
    return f"{path}.{TORCH_NAMES[attribute]}"


def _as_torch_bits(array: ndarray) -> ndarray:
    return array.view(np.int16) if array.dtype == ml_dtypes.bfloat16 else array
