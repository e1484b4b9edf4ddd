"""Functions that set and return the weights of a model. The canonical name of a weight is its attribute path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.lib.array_utils import byte_bounds

from transformer_spec.checks import check_type, some
from transformer_spec.names import PARTS, Model, check_weights, find, parameter_shapes, rounded


def set_weights(model: Model, weights: Mapping[str, ndarray]) -> None:
    """Copy weights into a model, rounding them to its dtype. The model never aliases the given arrays.

    Args:
        model: Model whose parameters are replaced in place.
        weights: One array per canonical parameter name, in any floating-point dtype. An ``Encoder`` ignores decoder
            parameters, and a ``Decoder`` ignores encoder parameters.

    Raises:
        TypeError: If a weight doesn't have a floating-point dtype, or an argument has the wrong type.
        ValueError: If the weights or the model's parameters don't match the model's config, if a weight overflows the
            model's dtype, or if a parameter is read-only. In these cases, the model is unchanged.
    """
    check_type("model", model, Model)
    check_weights(model.config, weights, part=model.part)
    found = parameters(model)
    for name, parameter in found.items():
        check_writable(name, parameter, np.shape(weights[name]))
    # Round all weights before the first parameter is changed, because a weight may overflow.
    arrays = {name: rounded(name, weights[name], parameter.dtype.name) for name, parameter in found.items()}
    for name, parameter in found.items():
        parameter[...] = arrays[name]


def get_weights(model: Model) -> dict[str, ndarray]:
    """Return a copy of every parameter of a model in the model's dtype, keyed by canonical name.

    Args:
        model: Model to read.

    Raises:
        TypeError: If ``model`` is not a model, or a parameter is not an array.
        ValueError: If the model's parameters don't match its config.
    """
    check_type("model", model, Model)
    return {name: parameter.copy() for name, parameter in parameters(model).items()}


def parameters(model: Model) -> dict[str, ndarray]:
    """Return the parameters of a model, keyed by canonical name, without copying them.

    Args:
        model: Model to read.

    Raises:
        TypeError: If a parameter is not an array.
        ValueError: If the number of layers doesn't match the config, a parameter has no canonical name, or two
            parameters use the same memory. Arrays in attributes whose name starts with ``_`` are not parameters.
    """
    for name in PARTS:
        stack, depth = getattr(model, name, None), getattr(model.config, f"num_{name}_layers")
        if stack is not None and len(stack.layers) != depth:
            raise ValueError(f"{name}.layers must have {depth} layers, as in the config: got {len(stack.layers)}")
    found = {name: find(model, name) for name in parameter_shapes(model.config, model.part)}
    names: dict[int, str] = {}  # canonical names, keyed by the lowest memory address of each array
    for name, array in found.items():
        if not isinstance(array, ndarray):
            raise TypeError(f"{name} must be an array: got {type(array).__name__}")
        second = find(model, name)
        if second is not array and not np.shares_memory(second, array):  # a property computes a new array
            raise ValueError(f"{name} must be stored in the model: got a new array; assign an array to an attribute")
        other = names.setdefault(byte_bounds(array)[0], name)
        if other != name:
            raise ValueError(
                f"{other} and {name} are the same array, but the config does not tie them; assign a copy to one of them"
            )
    named = {id(array) for array in found.values()}
    values = ((f"{path}{key}", x) for path, layer in layers(model).items() for key, x in _values(layer))
    arrays = [(name, x) for name, x in values if isinstance(x, ndarray) and _is_floating(x)]
    if others := [name for name, x in arrays if id(x) not in named and "._" not in f".{name}"]:
        raise ValueError(
            f"all parameters must have canonical names: got {some(others)}; merge or remove them, or start the names "
            "of attributes that are not parameters with _"
        )
    return found


def layers(model: Any) -> dict[str, Any]:
    """Return a model, its blocks, and its layers as a dict, keyed by path.

    The path of a block or layer ends with a dot, and the path of the model is empty. If several paths refer to the same
    layer, only one of them is a key.
    """
    found: dict[int, tuple[str, Any]] = {}

    def visit(path: str, part: Any) -> None:
        is_part = callable(part) and hasattr(part, "__dict__") and not isinstance(part, FunctionType | type)
        if is_part and id(part) not in found:
            found[id(part)] = path, part
            for key, value in _values(part):
                visit(f"{path}{key}.", value)

    visit("", model)
    return dict(found.values())


def _is_floating(array: ndarray) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"  # ml_dtypes defines bfloat16 with kind V


def _values(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each attribute of an object.

    For a list, tuple, or dict, yield the path and value of each entry instead.
    """
    for key, value in vars(owner).items():
        if type(value) in (list, tuple, dict):  # excludes subclasses, such as Recorder
            entries = value.items() if type(value) is dict else enumerate(value)
            yield from ((f"{key}.{i}", x) for i, x in entries)
        else:
            yield key, value


def check_writable(name: str, parameter: ndarray, shape: tuple[int, ...]) -> None:
    """Check that a parameter can be overwritten.

    Callers check all parameters before they overwrite the first parameter, so an error leaves the model unchanged.

    Raises:
        ValueError: If the parameter is read-only, is not a floating-point array, or has a different shape.
    """
    if not parameter.flags.writeable or parameter.dtype.kind != "f" or parameter.shape != shape:
        access = "writable" if parameter.flags.writeable else "read-only"
        raise ValueError(
            f"{name} must be a writable floating-point array of shape {list(shape)}: got a {access} {parameter.dtype} "
            f"array of shape {list(parameter.shape)}"
        )
