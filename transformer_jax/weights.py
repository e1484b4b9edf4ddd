"""Conversion of weights between canonical names and the parameters of a Flax model.

Names and shapes are the same, except that Flax calls an embedding matrix ``embedding`` instead of ``table``.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx
from jax import Array
from numpy import ndarray

from transformer_jax.embedding import LearnedPosition, TiedProjection, TokenEmbedding
from transformer_jax.fast import FAST
from transformer_jax.layers import LayerNorm, RMSNorm
from transformer_jax.relative_position import RelativePositionBias
from transformer_jax.runtime import check_float64, to_numpy
from transformer_spec.checks import some
from transformer_spec.names import Model, check_weights, find, parameter_shapes, rounded

# Types of variables that may remain in an exported model, because the forward pass doesn't depend on them.
NOT_WEIGHTS = (nnx.RngState, nnx.Intermediate, nnx.Cache, nnx.metrics.MetricState)
OWN_LAYERS = {
    layer.__call__
    for layer in (*FAST, *FAST.values(), LayerNorm, RMSNorm, TokenEmbedding, LearnedPosition, RelativePositionBias)
}


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounding them to its dtype. The model never aliases the given arrays.

    Args:
        model: Model whose parameters are replaced in place.
        weights: One array per canonical parameter name, in any floating-point dtype. An ``Encoder`` ignores decoder
            parameters, and a ``Decoder`` ignores encoder parameters.

    Raises:
        TypeError: If a weight doesn't have a floating-point dtype.
        ValueError: If the weights don't match the model's config or overflow its dtype, or the model has an adapter, a
            parameter with a different shape, an untied projection, or a parameter that would get two different values.
        RuntimeError: If the model is in float64 and ``jax_enable_x64`` is off.
    """
    check_weights(model.config, weights, part=model.part)
    parameters = {name: parameter_of(model, name) for name in parameter_shapes(model.config, model.part)}
    _check_replaceable(model, parameters, weights)
    for parameter in parameters.values():
        check_float64(parameter.dtype.name)
    # Round all weights before assigning any of them, so that an error leaves the model unchanged. JAX may alias a NumPy
    # array permanently, so pass a separate copy to JAX.
    arrays = {name: rounded(name, weights[name], parameter.dtype.name) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.set_value(_put(arrays[name], parameter.get_value()))


def get_weights(model: Model) -> dict[str, ndarray]:
    """Return a copy of every parameter of a model in the model's dtype, keyed by canonical name.

    If a layer was replaced with an ``nnx.LoRALinear``, the LoRA update is added to the kernel.

    Args:
        model: Model to read.

    Raises:
        ValueError: If a layer of this package was replaced with a different type of layer, if the forward pass uses a
            variable that has no canonical name, or if the parameters have only shapes and no values.
    """
    check_layers(model, adapters=True)
    return {name: _merged(model, name) for name in parameter_shapes(model.config, model.part)}


def parameter_of(model: Model, name: str) -> nnx.Param:
    """Return the parameter with the given canonical name."""
    return find(model, f"{name.removesuffix('table')}embedding" if name.endswith(".table") else name)


def check_layers(model: Model, *, adapters: bool = False) -> None:
    """Check that each layer uses only parameters that have a canonical name.

    Args:
        model: Model to check.
        adapters: If True, layers may be instances of ``nnx.LoRALinear`` instead of linear layers, and two canonical
            names may refer to the same parameter.

    Raises:
        ValueError: If a layer belongs to a class that may use additional parameters, if a parameter or another variable
            of the forward pass has no canonical name, or if two canonical names refer to the same parameter. This error
            is also raised if the output projection is tied but doesn't use the embedding matrix, or if the parameters
            have only shapes and no values.
    """
    adapted: set[int] = set()  # parameters of adapters
    first_names: dict[int, str] = {}
    for path, layer in _layers(model):
        is_adapter = _check_adapter(path, layer, adapters)
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
        if isinstance(found.get_raw_value(), jax.ShapeDtypeStruct):
            raise ValueError(f"{name} must have values: got only a shape; call set_weights(model, weights) first")
        if (first := first_names.setdefault(id(found), name)) != name and not adapters:
            raise ValueError(
                f"{first} and {name} are the same parameter, but the config does not tie them; assign a copy to one of "
                "them, or train the model with nnx.grad and nnx.Optimizer"
            )
    _check_tie(model)
    named = adapted | first_names.keys()
    others = [
        ".".join(map(str, path))
        for path, x in nnx.iter_graph(model)
        if isinstance(x, nnx.Variable) and not isinstance(x, NOT_WEIGHTS) and id(x) not in named
    ]
    if others:
        raise ValueError(f"all parameters must have canonical names: got {some(others)}; merge or remove them")


def check_loaded(model: Model) -> None:
    """Raise a ValueError if a variable of a loaded model still has only a shape, and no values."""
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):  # faster than iter_graph
        return
    values = ((path, x) for path, x in nnx.iter_graph(model) if isinstance(x, nnx.Variable | jax.ShapeDtypeStruct))
    empty = [
        ".".join(map(str, path))
        for path, x in values
        if isinstance(x.get_raw_value() if isinstance(x, nnx.Variable) else x, jax.ShapeDtypeStruct)
        and not isinstance(x, nnx.RngState)
    ]
    if empty:
        raise ValueError(
            f"only canonical parameters can be loaded: got {some(empty)}; create the model with its constructor, and "
            "then call set_weights(model, weights)"
        )


def one_dtype(parameters: Mapping[str, Array]) -> str:
    """Return the dtype that all parameters share. Raise a ValueError if the parameters have different dtypes."""
    names = sorted({array.dtype.name for array in parameters.values()})
    if len(names) > 1:
        raise ValueError(
            f"training requires parameters in one dtype: got {' and '.join(names)}; cast all parameters to float32, "
            "and set mixed_bfloat16 to compute in bfloat16"
        )
    return names[0]


def _layers(model):
    """Yield the path of each layer with parameters, and the layer. Include a tied output projection."""
    paths = dict.fromkeys(name.rpartition(".")[0] for name in parameter_shapes(model.config, model.part))
    for path in dict.fromkeys([*paths, *["output_proj"] * (model.part != "encoder")]):
        yield path, find(model, path)


def _check_adapter(path, layer, allowed):
    """Return whether a layer is an adapter. Raise a ValueError if the adapter is not allowed or can't be merged."""
    if type(layer).__call__ is not nnx.LoRALinear.__call__:
        return False
    if not allowed:
        raise ValueError(
            f"{path} must not be an adapter: got a {type(layer).__name__}; load the exported weights into a new model, "
            "or train the adapter with nnx.grad and nnx.Optimizer"
        )
    if type(layer.lora).__call__ is not nnx.LoRA.__call__:
        raise ValueError(
            f"{path}.lora must be an nnx.LoRA: got a {type(layer.lora).__name__}; merge the adapter into the kernel, "
            "and put the original layer back"
        )
    return True


def _check_tie(model):
    """Raise a ValueError if the config ties the output projection, but the projection has a different matrix."""
    is_tied = model.part != "encoder" and model.config.ties_output
    owner = "source_embedding" if model.config.shares_embedding else "target_embedding"
    matrix = getattr(getattr(find(model, "output_proj"), "embedding", None), "embedding", None) if is_tied else None
    if is_tied and matrix is not find(model, owner).embedding:
        raise ValueError(
            f"output_proj must be tied to {owner}: got a projection with a different matrix; restore the tie, and copy "
            "models with nnx.clone, because jax.tree.map and jax.device_put separate tied matrices"
        )


def _check_replaceable(model, parameters, weights):
    """Check that the model will use exactly the given weights after they are set. Otherwise, raise a ValueError."""
    for path, layer in _layers(model):
        _check_adapter(path, layer, allowed=False)
    if isinstance(getattr(model, "output_proj", None), TiedProjection):
        _check_tie(model)
    first_names: dict[int, str] = {}
    for name, shape in parameter_shapes(model.config, model.part).items():
        if (found := parameters[name].shape) != shape:
            raise ValueError(
                f"{name} of the model must have shape {list(shape)}: got {list(found)}; set the weights of each model "
                "before you combine the models in an ensemble"
            )
        first = first_names.setdefault(id(parameters[name]), name)
        if first != name and not np.array_equal(weights[first], weights[name]):
            raise ValueError(
                f"{first} and {name} must have the same weights, because they are the same parameter: got different "
                "weights; assign a copy of the parameter to one of the layers"
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
