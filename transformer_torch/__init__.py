"""The Transformer from "Attention Is All You Need" as PyTorch modules."""

import transformer_spec
from transformer_spec import *  # noqa: F403  re-exported, so that users need only one import
from transformer_torch.attention import (
    KeyValueCache,
    KeyValues,
    MultiHeadAttention,
    merge_heads,
    scaled_dot_product_attention,
    split_heads,
)
from transformer_torch.decoder import DecoderCache, DecoderLayer, DecoderStack
from transformer_torch.embedding import (
    LearnedPosition,
    NoPosition,
    OutputProjection,
    SinusoidalPosition,
    TokenEmbedding,
    sinusoidal_encoding,
)
from transformer_torch.encoder import EncoderLayer, EncoderStack
from transformer_torch.feed_forward import GatedFeedForward, PositionwiseFeedForward
from transformer_torch.layers import Dropout, LayerNorm, Linear, RMSNorm
from transformer_torch.masks import causal_mask, padding_mask, target_padding_mask
from transformer_torch.parallel import make_mesh, shards
from transformer_torch.relative_position import RelativePositionBias
from transformer_torch.runtime import describe, set_precision
from transformer_torch.search import beam_search, greedy_search, sample, score
from transformer_torch.training import Trainer, cross_entropy, gradients
from transformer_torch.transformer import Decoder, Encoder, Transformer, load_transformer
from transformer_torch.weights import get_weights, set_weights

__all__ = [
    "Decoder",
    "DecoderCache",
    "DecoderLayer",
    "DecoderStack",
    "Dropout",
    "Encoder",
    "EncoderLayer",
    "EncoderStack",
    "GatedFeedForward",
    "KeyValueCache",
    "KeyValues",
    "LayerNorm",
    "LearnedPosition",
    "Linear",
    "MultiHeadAttention",
    "NoPosition",
    "OutputProjection",
    "PositionwiseFeedForward",
    "RMSNorm",
    "RelativePositionBias",
    "SinusoidalPosition",
    "TokenEmbedding",
    "Trainer",
    "Transformer",
    "beam_search",
    "causal_mask",
    "cross_entropy",
    "describe",
    "get_weights",
    "gradients",
    "greedy_search",
    "load_transformer",
    "make_mesh",
    "merge_heads",
    "padding_mask",
    "sample",
    "scaled_dot_product_attention",
    "score",
    "set_precision",
    "set_weights",
    "shards",
    "sinusoidal_encoding",
    "split_heads",
    "target_padding_mask",
]
__all__ += transformer_spec.__all__
