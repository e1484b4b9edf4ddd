"""The Transformer from "Attention Is All You Need" in NumPy. This package is the reference for the other packages.

The model is post-norm, as in the paper, unless the config specifies otherwise. Read ``functional`` first, then the
modules in the order of the paper: masks, attention, layers, feed_forward, embedding, encoder, decoder, part, and
transformer. Then read backward, optimizer, and training, followed by search and search_loop. Functions and layers
define their backward pass next to their forward pass. The module ``backward`` combines these backward passes into the
backward pass of the full model. The learning rate schedule, equation (3), is in ``transformer_spec.training_config``.
``fast`` contains optimized versions of some functions and layers. A model uses these versions unless you create it with
``fast=False``.
"""

import transformer_spec
from reference_numpy.attention import (
    KeyValueCache,
    KeyValues,
    MultiHeadAttention,
    merge_heads,
    scaled_dot_product_attention,
    split_heads,
)
from reference_numpy.backward import transformer_backward
from reference_numpy.decoder import DecoderCache, DecoderLayer, DecoderStack
from reference_numpy.embedding import (
    LearnedPosition,
    NoPosition,
    OutputProjection,
    SinusoidalPosition,
    TokenEmbedding,
    sinusoidal_encoding,
)
from reference_numpy.encoder import EncoderLayer, EncoderStack
from reference_numpy.feed_forward import GatedFeedForward, PositionwiseFeedForward
from reference_numpy.layers import Dropout, LayerNorm, Linear, RMSNorm
from reference_numpy.masks import causal_mask, padding_mask, target_padding_mask
from reference_numpy.parallel import make_mesh, shards
from reference_numpy.relative_position import RelativePositionBias
from reference_numpy.runtime import describe, set_precision
from reference_numpy.search import beam_search, greedy_search, sample, score
from reference_numpy.training import Trainer, cross_entropy, gradients
from reference_numpy.transformer import Decoder, Encoder, Transformer, load_transformer
from reference_numpy.weights import get_weights, set_weights
from transformer_spec import *  # noqa: F403  re-exported, so that users need only one import

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
    "transformer_backward",
]
__all__ += transformer_spec.__all__
