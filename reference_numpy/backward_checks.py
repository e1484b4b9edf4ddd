"""Check that the backward pass matches the forward pass of a model, because users can replace the model's layers."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from numpy import ndarray

from reference_numpy.attention import MultiHeadAttention, scaled_dot_product_attention
from reference_numpy.decoder import DecoderLayer, DecoderStack
from reference_numpy.embedding import LearnedPosition, NoPosition, SinusoidalPosition
from reference_numpy.encoder import EncoderLayer, EncoderStack
from reference_numpy.fast import attend
from reference_numpy.feed_forward import GatedFeedForward, PositionwiseFeedForward
from reference_numpy.layers import Dropout
from reference_numpy.transformer import Transformer
from transformer_spec.checks import some
from transformer_spec.config import TransformerConfig
from transformer_spec.names import parameter_shapes

# Blocks and layers, keyed by attribute name, that have no backward pass or whose backward pass is in ``backward``. All
# other layers define their own backward pass.
BLOCKS: dict[str, tuple[type, ...]] = {
    "encoder": (EncoderStack,),
    "decoder": (DecoderStack,),
    "layers": (EncoderLayer, DecoderLayer),
    "self_attention": (MultiHeadAttention,),
    "cross_attention": (MultiHeadAttention,),
    "feed_forward": (GatedFeedForward, PositionwiseFeedForward),
    "source_position": (SinusoidalPosition, LearnedPosition, NoPosition),
    "target_position": (SinusoidalPosition, LearnedPosition, NoPosition),
    "dropout": (Dropout,),
}
# Suffixes of attribute names. Attributes with these suffixes are layers with parameters.
LAYERS = ("_proj", "_norm", "_embedding", "_position", "relative_bias")
METHODS = ("__call__", "_encode", "_decode", "project")  # methods that the backward pass of a block differentiates
REMEDY = "the backward pass cannot differentiate a different formula"


def check_backward(model: Transformer) -> None:
    """Check that the backward pass differentiates the forward pass that the model computes.

    Raises:
        ValueError: If a block or its ``attend`` function was changed, or if a layer overrides ``__call__`` or
            ``vectors`` but not ``backward``. Also if the config ties the source and target embeddings, but the model
            has a separate layer for each of them.
    """
    _check_block("", model, (Transformer,))
    if model.config.shares_embedding and model.target_embedding is not model.source_embedding:
        raise ValueError("target_embedding must be source_embedding, as in the config: got a different layer")


def _check_block(path: str, block: Any, kinds: tuple[type, ...]) -> None:
    """Check a block of the model, and all blocks and layers that this block contains."""
    where, got = path or "the model", type(block).__name__
    kind = next((kind for kind in kinds if isinstance(block, kind)), None)
    if kind is None:
        needed = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{where} must be an instance of {needed}: got {got}; {REMEDY}")
    for method in METHODS if kind is not LearnedPosition else ():
        own = method in vars(block)
        if own or getattr(type(block), method, None) is not getattr(kind, method, None):
            found = "a function of the instance" if own else f"{got}.{method}"
            raise ValueError(f"{where} must use {kind.__name__}.{method}: got {found}; {REMEDY}")
    if isinstance(block, MultiHeadAttention) and block.attend not in (scaled_dot_product_attention, attend):
        raise ValueError(f"{where}.attend must be scaled_dot_product_attention: got a different function; {REMEDY}")
    for name, value in vars(block).items():
        several = name == "layers"
        for i, part in enumerate(value if several else [value]):
            inner = f"{path}.{name}.{i}".lstrip(".") if several else f"{path}.{name}".lstrip(".")
            if part is not None and name in BLOCKS:
                _check_block(inner, part, BLOCKS[name])
            if part is not None and name.endswith(LAYERS) and not isinstance(part, SinusoidalPosition | NoPosition):
                _check_layer(inner, part)


def _check_layer(path: str, layer: Any) -> None:
    """Check that a layer that overrides its forward pass also overrides its backward pass."""
    for method in ("__call__", "vectors"):
        if _depth(layer, method) < _depth(layer, "backward"):
            got = type(layer).__name__
            raise ValueError(f"{path} must override backward if it overrides {method}: got {got}")


def _depth(layer: Any, method: str) -> float:
    """Return the position of the object or class that defines a method, in Python's attribute lookup order.

    Return infinity if neither the object nor its classes define the method.
    """
    owners = (layer, *type(layer).__mro__) if hasattr(layer, "__dict__") else type(layer).__mro__
    return next((float(i) for i, owner in enumerate(owners) if method in vars(owner)), inf)


def check_seen(seen: Mapping[str, ndarray]) -> None:
    """Check that the tap of the forward pass replaced only dropout masks.

    Raises:
        ValueError: If a ``Recorder`` replaced a value.
    """
    replaced = [name for name in getattr(seen, "replace", ()) if not name.endswith("_keep")]
    if replaced:
        raise ValueError(f"seen must not replace values: got {some(replaced)}; record a call without replacements")


def check_gradients(gradients: Mapping[str, ndarray], config: TransformerConfig) -> None:
    """Check that every layer passed the gradients of its parameters to ``tap``.

    Raises:
        ValueError: If the gradient of a parameter is missing.
    """
    if missing := [name for name in parameter_shapes(config) if name not in gradients]:
        raise ValueError(
            f"backward must compute the gradients of all parameters: {some(missing)} missing; for a frozen "
            "parameter, call tap with zeros"
        )
