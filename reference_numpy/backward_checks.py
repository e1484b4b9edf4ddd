"""Check that the backward pass applies to a model whose layers a user may have replaced."""

from __future__ import annotations

from reference_numpy.attention import MultiHeadAttention, scaled_dot_product_attention
from reference_numpy.decoder import DecoderLayer, DecoderStack
from reference_numpy.embedding import SinusoidalPosition
from reference_numpy.encoder import EncoderLayer, EncoderStack
from reference_numpy.fast import attend
from reference_numpy.feed_forward import PositionwiseFeedForward
from reference_numpy.layers import Dropout
from reference_numpy.transformer import Transformer
from reference_numpy.weights import layers

# Blocks and layers whose backward pass is in ``backward``, or that have none.
BLOCKS = (
    Transformer,
    EncoderStack,
    DecoderStack,
    EncoderLayer,
    DecoderLayer,
    MultiHeadAttention,
    PositionwiseFeedForward,
    SinusoidalPosition,
    Dropout,
)
REMEDY = "the backward pass cannot differentiate a different formula"


def check_backward(model: Transformer) -> None:
    """Check that the backward pass differentiates the forward pass that the model computes.

    Raises:
        ValueError: If a block or its ``attend`` function was changed, a layer overrides ``__call__`` but not
            ``backward``, or tied embeddings are different layers.
    """
    for path, layer in layers(model).items():
        kind, where = type(layer), path.removesuffix(".") or "the model"
        block = next((block for block in BLOCKS if isinstance(layer, block)), None)
        if block is not None and kind.__call__ is not block.__call__:
            raise ValueError(f"{where} must use {block.__name__}.__call__: got {kind.__name__}.__call__; {REMEDY}")
        if isinstance(layer, MultiHeadAttention) and layer.attend not in (scaled_dot_product_attention, attend):
            raise ValueError(f"{where}.attend must be scaled_dot_product_attention: got a different function; {REMEDY}")
        if _ancestor(kind, "__call__") < _ancestor(kind, "backward"):
            raise ValueError(f"{where} must override backward if it overrides __call__: got {kind.__name__}")
    if model.config.tie_embeddings == "all" and model.target_embedding is not model.source_embedding:
        raise ValueError("target_embedding must be source_embedding, as in the config: got a different layer")


def _ancestor(kind, method):
    """Return how many classes separate a class from the ancestor that defines a method, or 0 if no class defines it."""
    return next((i for i, ancestor in enumerate(kind.__mro__) if method in vars(ancestor)), 0)
