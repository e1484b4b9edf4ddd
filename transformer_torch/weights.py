"""Canonical weights in and out of the model: a name is the path of a layer, with a name for each of its parameters.

A canonical ``kernel`` is [in, out], PyTorch's ``weight`` is [out, in]: only this file transposes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn

from transformer_spec.checks import some
from transformer_spec.names import Model, check_weights, find, parameter_shapes, rounded
from transformer_torch.embedding import LearnedPosition, TiedProjection, TokenEmbedding
from transformer_torch.layers import LayerNorm
from transformer_torch.runtime import dtype_name

TORCH_NAMES = {"kernel": "weight", "scale": "weight", "bias": "bias", "table": "weight"}
REMEDY = "merge adapters first, as by peft's merge_and_unload(), and export weights before you quantize them"
OWN_LAYERS = (nn.Linear, TokenEmbedding, LearnedPosition, LayerNorm, TiedProjection)


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounded to its dtype; the caller's arrays are never aliased.

    Raises:
        TypeError: If a weight is not of a floating-point dtype.
        ValueError: If the weights don't match the model's config, or overflow its dtype.
    """
    check_weights(model.config, weights, part=model.part)
    for name, parameter in parameters(model).items():
        copy_in(name, weights[name], parameter)


def get_weights(model: Model) -> dict[str, ndarray]:
    """Copy every parameter out of a model, in the model's dtype; errors as in the two functions that it calls."""
    check_complete(model, frozen=True)
    return {name: copy_out(name, weight) for name, weight in computed_with(model).items()}


def computed_with(model: Any) -> dict[str, Tensor]:
    """Return the weights that the model computes with by canonical name, parametrized or not; a kernel is transposed.

    Raises:
        ValueError: If a layer may compute with something else, such as an adapter or a quantized layer.
    """
    found: dict[str, Any] = {}
    for name in parameter_shapes(model.config, model.part):
        path, _, attribute = torch_path(name).rpartition(".")
        layer = _layer(model, path)
        found[name] = getattr(layer, attribute, None)
        if type(found[name]) not in (Tensor, nn.Parameter) and not hasattr(found[name], "device_mesh"):
            raise ValueError(f"{name} must be a plain tensor: got {type(found[name]).__name__}; {REMEDY}")
    if model.part != "encoder":
        _layer(model, "output_proj")  # also if it is tied and has no name
    return found


def check_complete(model: Any, *, frozen: bool = False) -> None:
    """Raise ValueError if a trainable (or frozen) parameter has no canonical name, such as an adapter's.

    Nor has the matrix of an output layer that is tied to an embedding which was replaced since.
    """
    layers = dict.fromkeys(torch_path(name).rpartition(".")[0] for name in parameter_shapes(model.config, model.part))
    named = {parameter for path in layers for parameter in _layer(model, path).parameters()}
    others = [path for path, p in model.named_parameters() if (frozen or p.requires_grad) and p not in named]
    if others:
        kind = "" if frozen else "trainable "
        raise ValueError(f"all {kind}parameters must have canonical names: got {some(others)}; {REMEDY}")
    output = None if model.part == "encoder" else _layer(model, "output_proj")
    if isinstance(output, TiedProjection) and output.embedding not in model.modules():
        raise ValueError("output_proj must be tied to target_embedding: got one that is tied to another embedding")


def _layer(model, path):
    """Return a layer that computes what this package's layer in that place does."""
    layer = find(model, path)
    layer = getattr(layer, "_orig_mod", layer)  # of torch.compile
    if type(layer).forward not in [own.forward for own in OWN_LAYERS]:
        kind = f"{type(layer).__module__.partition('.')[0]} {type(layer).__name__}"
        raise ValueError(f"{path} must compute with its weight and bias only: got a {kind}; {REMEDY}")
    return layer


def parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the model's own parameters by canonical name; a kernel is transposed.

    Raises:
        ValueError: As in ``computed_with``, or if a weight is computed from others (``torch.nn.utils.parametrize``).
    """
    found: dict[str, nn.Parameter] = {}
    for name, weight in computed_with(model).items():
        if not isinstance(weight, nn.Parameter):
            raise ValueError(f"{name} is not a parameter of its own: remove the layer's parametrization first")
        found[name] = weight
    return found


@torch.no_grad()
def copy_in(name: str, array: ndarray, tensor: Tensor) -> None:
    """Copy an array into a parameter or what is shaped like it, rounded to its dtype.

    Raises:
        ValueError: A finite value overflows the dtype.
    """
    array = rounded(name, array, dtype_name(tensor))
    bits = torch.from_numpy(array.view(np.int16) if array.dtype == ml_dtypes.bfloat16 else array)
    whole = (bits.T if name.endswith("kernel") else bits).view(tensor.dtype)
    index, local = local_part(tensor)
    local.copy_(whole[index] if whole.shape == tensor.shape else whole)  # copy_ refuses another shape


def copy_out(name: str, tensor: Tensor) -> ndarray:
    """Copy a parameter, or what is shaped like it, into an array of its canonical shape; a divided one is gathered."""
    tensor = gathered(tensor.detach()).cpu()
    tensor = (tensor.T if name.endswith("kernel") else tensor).contiguous()
    if tensor.dtype == torch.bfloat16:  # which Tensor.numpy refuses
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return tensor.numpy().copy()


def is_divided(model: nn.Module) -> bool:
    """Return whether a mesh divides parameters of a model, so that each process has only parts of them."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def gathered(tensor: Any) -> Tensor:
    """Return the whole of a tensor that a mesh may divide, to every process of the mesh."""
    if not hasattr(tensor, "device_mesh"):  # what is imported below is a second, and nothing else needs it
        return tensor
    from torch.distributed.tensor import Replicate

    placements = [*tensor.placements]
    for axis in range(len(placements)):  # torch would do the same, but warn of it
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def local_part(tensor: Any) -> tuple[tuple[slice, ...], Tensor]:
    """Return what this process holds of a tensor, which a mesh may divide, and where in the whole that lies."""
    if not hasattr(tensor, "device_mesh"):
        return tuple(slice(0, size) for size in tensor.shape), tensor
    (chunk,) = tensor.__create_chunk_list__()
    index = (slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return tuple(index), tensor.to_local()


def torch_path(name: str) -> str:
    """Return the name that torch has for a parameter of canonical name."""
    path, _, attribute = name.rpartition(".")
    return f"{path}.{TORCH_NAMES[attribute]}"
