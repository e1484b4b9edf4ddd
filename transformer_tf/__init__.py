"""The Transformer from "Attention Is All You Need" as a Keras model and its layers."""

import transformer_spec
from transformer_spec import *  # noqa: F403  re-exported, so that users need only one import
from transformer_tf.attention import (
    KeyValueCache,
    KeyValues,
    MultiHeadAttention,
    merge_heads,
    scaled_dot_product_attention,
    split_heads,
)
from transformer_tf.decoder import DecoderCache, DecoderLayer, DecoderStack
from transformer_tf.embedding import (
    LearnedPosition,
    NoPosition,
    OutputProjection,
    SinusoidalPosition,
    TokenEmbedding,
    sinusoidal_encoding,
)
from transformer_tf.encoder import EncoderLayer, EncoderStack
from transformer_tf.feed_forward import GatedFeedForward, PositionwiseFeedForward
from transformer_tf.layers import Dropout, LayerNorm, Linear, RMSNorm
from transformer_tf.masks import causal_mask, padding_mask, target_padding_mask
from transformer_tf.parallel import make_mesh, shards
from transformer_tf.relative_position import RelativePositionBias
from transformer_tf.runtime import describe, set_precision
from transformer_tf.search import beam_search, greedy_search, sample, score
from transformer_tf.training import CrossEntropy, Trainer, cross_entropy, gradients
from transformer_tf.transformer import Decoder, Encoder, Transformer, load_transformer
from transformer_tf.weights import get_weights, set_weights

__all__ = [
    "CrossEntropy",
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
