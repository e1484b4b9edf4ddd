"""Conversion of weights between canonical names and the parameters of a PyTorch model.

A canonical ``kernel`` has shape [in, out], and a PyTorch ``weight`` has shape [out, in]. Only this module transposes
kernels.
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
from transformer_torch.layers import LayerNorm, RMSNorm
from transformer_torch.relative_position import RelativePositionBias
from transformer_torch.runtime import dtype_name

TORCH_NAMES = {"kernel": "weight", "scale": "weight", "bias": "bias", "table": "weight"}
REMEDY = "merge adapters first, for example with peft's merge_and_unload(), and export weights before you quantize"
OWN_LAYERS = (nn.Linear, TokenEmbedding, LearnedPosition, RelativePositionBias, LayerNorm, RMSNorm, TiedProjection)


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounding them to its dtype. The model never aliases the given arrays.

    Args:
        model: Model whose parameters are replaced in place.
        weights: One array per canonical parameter name, in any floating-point dtype. An ``Encoder`` ignores decoder
            parameters, and a ``Decoder`` ignores encoder parameters.

    Raises:
        TypeError: If a weight doesn't have a floating-point dtype.
        ValueError: If the weights don't match the model's config, or if a weight overflows the model's dtype. In these
            cases, the model is unchanged.
    """
    check_weights(model.config, weights, part=model.part)
    found = parameters(model)
    # Round all weights before the first parameter is changed, because a weight may overflow.
    arrays = {name: rounded(name, weights[name], dtype_name(parameter)) for name, parameter in found.items()}
    for name, parameter in found.items():
        copy_in(name, arrays[name], parameter)


def get_weights(model: Model) -> dict[str, ndarray]:
    """Return a copy of every parameter of a model in the model's dtype, keyed by canonical name.

    Args:
        model: Model to read.

    Raises:
        ValueError: If a layer was replaced with a quantized layer, an adapter, or another layer that has additional
            parameters, or if a hook computes a weight before each forward pass.
    """
    check_complete(model, frozen=True)
    found = computed_with(model)
    for name in found:
        path, _, attribute = torch_path(name).rpartition(".")
        layer = _layer(model, path)
        if attribute in vars(layer) and layer._forward_pre_hooks:  # the attribute may be outdated
            raise ValueError(
                f"{name} must not be computed by a hook: call prune.remove, remove_weight_norm, or "
                "remove_spectral_norm first, or use torch.nn.utils.parametrizations"
            )
    return {name: copy_out(name, weight) for name, weight in found.items()}


def computed_with(model: Any) -> dict[str, Tensor]:
    """Return the tensors that the model uses as weights, keyed by canonical name. Kernels have PyTorch's shape.

    The weight of a parametrized layer is the tensor that is computed from its parameters.

    Raises:
        ValueError: If a layer may use more tensors than its weight and bias, as adapters and quantized layers do.
    """
    found: dict[str, Any] = {}
    for name in parameter_shapes(model.config, model.part):
        path, _, attribute = torch_path(name).rpartition(".")
        layer = _layer(model, path)
        found[name] = getattr(layer, attribute, None)
        if type(found[name]) not in (Tensor, nn.Parameter) and not hasattr(found[name], "device_mesh"):
            raise ValueError(f"{name} must be a plain tensor: got {type(found[name]).__name__}; {REMEDY}")
    if model.part != "encoder":
        _layer(model, "output_proj")  # check the layer even if its matrix is tied and has no canonical name
    return found


def check_complete(model: Any, *, frozen: bool = False) -> None:
    """Check that every trainable parameter has a canonical name, and that a tied output uses the model's embedding.

    Args:
        model: Model to check.
        frozen: If True, frozen parameters are checked too.

    Raises:
        ValueError: If a parameter has no canonical name, such as an adapter's weight or a bias that the config doesn't
            have, or if the embedding that is tied to the output projection was replaced.
    """
    named = set[nn.Parameter]()
    for name in parameter_shapes(model.config, model.part):
        path, _, attribute = torch_path(name).rpartition(".")
        for own, parameter in _layer(model, path).named_parameters():
            # A weight may be computed from parametrizations.weight.original, weight_orig, or weight_g and weight_v.
            if own.removeprefix("parametrizations.").startswith(attribute):
                named.add(parameter)
    others = [path for path, p in model.named_parameters() if (frozen or p.requires_grad) and p not in named]
    if others:
        kind = "" if frozen else "trainable "
        raise ValueError(
            f"all {kind}parameters must have canonical names: got {some(others)}; {REMEDY}, "
            "and remove every bias and matrix that the config doesn't have"
        )
    check_tie(model)


def check_tie(model: Any, *_: Any) -> None:
    """Check that a tied output projection uses an embedding of the model. PyTorch calls this before ``state_dict``.

    Otherwise, the projection matrix would be neither trained nor saved.

    Raises:
        ValueError: If the embedding that is tied to the output projection was replaced.
    """
    output = None if model.part == "encoder" else getattr(model.output_proj, "_orig_mod", model.output_proj)
    if isinstance(output, TiedProjection) and output.embedding not in model.target_embedding.modules():
        raise ValueError(
            "output_proj must be tied to target_embedding: got a projection that is tied to a different embedding; "
            "replace it with OutputProjection(config, model.target_embedding, dtype)"
        )


def _layer(model, path):
    """Return the layer at a path.

    Raise a ValueError unless the layer uses the ``forward`` method of a class in ``OWN_LAYERS``.
    """
    layer = find(model, path)
    layer = getattr(layer, "_orig_mod", layer)  # unwrap torch.compile
    if type(layer).forward not in [own.forward for own in OWN_LAYERS]:
        kind = f"{type(layer).__module__.partition('.')[0]} {type(layer).__name__}"
        raise ValueError(f"{path} must compute with its weight and bias only: got a {kind}; {REMEDY}")
    return layer


def parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the model's parameters, keyed by canonical name. Kernels have PyTorch's shape.

    Raises:
        ValueError: If a layer may use more tensors than its weight and bias, or if a weight is computed from other
            parameters, for example by ``torch.nn.utils.parametrize``.
    """
    found: dict[str, nn.Parameter] = {}
    for name, weight in computed_with(model).items():
        if not isinstance(weight, nn.Parameter):
            raise ValueError(
                f"{name} must be an nn.Parameter: got a tensor computed by a parametrization; remove it with "
                "torch.nn.utils.parametrize.remove_parametrizations"
            )
        found[name] = weight
    return found


@torch.no_grad()
def copy_in(name: str, array: ndarray, tensor: Tensor) -> None:
    """Copy an array into a parameter, or into a tensor of the same shape, rounding to the tensor's dtype.

    Args:
        name: Canonical name of the parameter.
        array: Array in the canonical shape.
        tensor: Tensor to overwrite.

    Raises:
        ValueError: If a finite value overflows the tensor's dtype.
    """
    array = rounded(name, array, dtype_name(tensor))
    bits = torch.from_numpy(array.view(np.int16) if array.dtype == ml_dtypes.bfloat16 else array)
    whole = (bits.T if name.endswith("kernel") else bits).view(tensor.dtype)
    index, local = local_part(tensor)
    local.copy_(whole[index] if whole.shape == tensor.shape else whole)  # copy_ raises if the shapes differ


def copy_out(name: str, tensor: Tensor) -> ndarray:
    """Return a copy of a parameter, or of a tensor of the same shape, as an array in the canonical shape.

    A tensor that is sharded over a mesh is gathered first.

    Args:
        name: Canonical name of the parameter.
        tensor: Tensor to copy.
    """
    tensor = gathered(tensor.detach()).cpu()
    tensor = (tensor.T if name.endswith("kernel") else tensor).contiguous()
    if tensor.dtype == torch.bfloat16:  # Tensor.numpy doesn't support bfloat16
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return tensor.numpy().copy()


def is_divided(model: nn.Module) -> bool:
    """Return whether a mesh shards parameters of the model, so that each process has only a part of them."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def gathered(tensor: Any) -> Tensor:
    """Return the full tensor. If a mesh shards it, all processes in the mesh must call this function."""
    if not hasattr(tensor, "device_mesh"):  # avoid the import below, which takes a second
        return tensor
    from torch.distributed.tensor import Replicate

    placements = [*tensor.placements]
    for axis in range(len(placements)):  # PyTorch would do the same, but with a warning
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def local_part(tensor: Any) -> tuple[tuple[slice, ...], Tensor]:
    """Return the position of this process's shard in the full tensor, and the shard."""
    if not hasattr(tensor, "device_mesh"):
        return tuple(slice(0, size) for size in tensor.shape), tensor
    (chunk,) = tensor.__create_chunk_list__()
    index = (slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return tuple(index), tensor.to_local()


def torch_path(name: str) -> str:
    """Return the PyTorch name of the parameter with the given canonical name."""
    path, _, attribute = name.rpartition(".")
    return f"{path}.{TORCH_NAMES[attribute]}"
