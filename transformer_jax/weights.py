"""Conversion of weights between canonical names and the parameters of a Flax model.

Names and shapes are the same, except that Flax calls an embedding matrix ``embedding`` instead of ``table``.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx
from numpy import ndarray

from transformer_jax.embedding import LearnedPosition, TokenEmbedding
from transformer_jax.fast import FAST
from transformer_jax.layers import LayerNorm
from transformer_jax.runtime import check_float64, to_numpy
from transformer_spec.checks import some
from transformer_spec.names import Model, check_weights, find, parameter_shapes, rounded

OWN_LAYERS = {layer.__call__ for layer in (*FAST, *FAST.values(), LayerNorm, TokenEmbedding, LearnedPosition)}


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounding them to its dtype. The model never aliases the given arrays.

    Args:
        model: Model whose parameters are replaced in place.
        weights: One array per canonical parameter name, in any floating-point dtype. An ``Encoder`` ignores decoder
            parameters, and a ``Decoder`` ignores encoder parameters.

    Raises:
        TypeError: If a weight doesn't have a floating-point dtype.
        ValueError: If the weights don't match the model's config or overflow its dtype.
        RuntimeError: If the model is in float64 and ``jax_enable_x64`` is off.
    """
    check_weights(model.config, weights, part=model.part)
    parameters = {name: parameter_of(model, name) for name in parameter_shapes(model.config, model.part)}
    for parameter in parameters.values():
        check_float64(parameter.dtype.name)
    # Round all weights first, so that an error leaves the model unchanged. JAX may alias a NumPy array permanently, so
    # give it a separate copy.
    arrays = {name: rounded(name, weights[name], parameter.dtype.name) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.set_value(_put(arrays[name], parameter.get_value()))


def get_weights(model: Model) -> dict[str, ndarray]:
    """Return a copy of every parameter of a model in the model's dtype, keyed by canonical name.

    If a layer was replaced with an ``nnx.LoRALinear``, the LoRA update is added to the kernel.

    Args:
        model: Model to read.

    Raises:
        ValueError: If a layer of this package was replaced with a different type of layer, or a trainable parameter has
            no canonical name.
    """
    check_layers(model, adapters=True)
    return {name: _merged(model, name) for name in parameter_shapes(model.config, model.part)}


def parameter_of(model: Model, name: str) -> nnx.Param:
    """Return the parameter with the given canonical name."""
    return find(model, f"{name.removesuffix('table')}embedding" if name.endswith(".table") else name)


def check_layers(model: Model, *, adapters: bool = False) -> None:
    """Check that each layer computes with its canonical parameters only.

    Args:
        model: Model to check.
        adapters: True allows an ``nnx.LoRALinear`` instead of a linear layer, and a parameter with two canonical names.

    Raises:
        ValueError: If a layer may compute with other parameters, a trainable parameter has no canonical name, two
            canonical names refer to the same parameter, or a tied output projection uses a different matrix.
    """
    adapted: set[int] = set()  # parameters of adapters
    first_names: dict[int, str] = {}
    paths = dict.fromkeys(name.rpartition(".")[0] for name in parameter_shapes(model.config, model.part))
    for path in [*paths, *["output_proj"] * (model.part != "encoder")]:  # check the projection even if it is tied
        layer = find(model, path)
        is_adapter = type(layer).__call__ is nnx.LoRALinear.__call__
        if is_adapter and not adapters:
            raise ValueError(
                f"{path} must not be an adapter: got a {type(layer).__name__}; load the model's export_weights() into "
                "a new model, or train the adapter with nnx.grad and nnx.Optimizer"
            )
        if not is_adapter and type(layer).__call__ not in OWN_LAYERS:
            raise ValueError(
                f"{path} must compute with its own weights only: got a {type(layer).__name__}; merge its update into "
                "the original layer, and put the original layer back"
            )
        if is_adapter:
            adapted |= {id(leaf) for _, leaf in nnx.iter_graph(layer.lora)}
    for name in parameter_shapes(model.config, model.part):
        if not isinstance(found := parameter_of(model, name), nnx.Variable if adapters else nnx.Param):
            raise ValueError(
                f"{name} must be an nnx.Param: got {type(found).__name__}; assign an nnx.Param, or train the other "
                "parameters with nnx.grad and nnx.Optimizer"
            )
        if (first := first_names.setdefault(id(found), name)) != name and not adapters:
            raise ValueError(
                f"{first} and {name} are the same parameter, but the config does not tie them; assign a copy to one of "
                "them, or train the model with nnx.grad and nnx.Optimizer"
            )
    is_tied = model.part != "encoder" and model.config.tie_embeddings != "none"
    owner = "source_embedding" if model.config.tie_embeddings == "all" else "target_embedding"
    matrix = getattr(getattr(find(model, "output_proj"), "embedding", None), "embedding", None) if is_tied else None
    if is_tied and matrix is not find(model, owner).embedding:
        raise ValueError(
            f"output_proj must be tied to {owner}: got a projection with a different matrix; restore the tie, and copy "
            "models with nnx.clone, because jax.tree.map and jax.device_put separate tied matrices"
        )
    named = adapted | first_names.keys()
    leaves = nnx.iter_graph(model)
    others = [".".join(map(str, path)) for path, x in leaves if isinstance(x, nnx.Param) and id(x) not in named]
    if others:
        raise ValueError(
            f"all trainable parameters must have canonical names: got {some(others)}; merge or remove them"
        )


def _merged(model, name):
    """Return a copy of a parameter, including the update of its layer's adapter."""
    array, layer = to_numpy(parameter_of(model, name).get_value()), find(model, name.rpartition(".")[0])
    if not (isinstance(layer, nnx.LoRALinear) and name.endswith(".kernel")):
        return array
    low, high = (to_numpy(x.get_value()).astype(np.float64) for x in (layer.lora.lora_a, layer.lora.lora_b))
    return rounded(name, array + low @ high, array.dtype.name)


def _put(array, old):
    """Move the array to the device of the old array. If the old array is committed, commit the new array."""
    if not isinstance(old, jax.Array):  # a shape, or a NumPy array in a restored state
        return jax.device_put(array)
    if old.committed:
        return jax.device_put(array, old.sharding)
    with jax.default_device(*old.devices()):
        return jax.device_put(array)
