"""The Transformer of "Attention Is All You Need", written down once in NumPy: the definition.

Post-norm, as in the paper, unless the config says otherwise. Read the modules in the paper's order: masks,
attention, feed_forward, embedding, encoder, decoder, transformer.
"""

from reference_numpy.attention import (
    MultiHeadAttention,
    additive_attention,
    merge_heads,
    scaled_dot_product_attention,
    split_heads,
)
from reference_numpy.config import PRESETS, DropoutRates, TransformerConfig
from reference_numpy.decoder import Decoder, DecoderLayer
from reference_numpy.embedding import (
    LearnedPosition,
    OutputProjection,
    SinusoidalPosition,
    TokenEmbedding,
    sinusoidal_encoding,
)
from reference_numpy.encoder import Encoder, EncoderLayer
from reference_numpy.feed_forward import PositionwiseFeedForward
from reference_numpy.files import load_weights, save_weights
from reference_numpy.layers import Dropout, LayerNorm, Linear
from reference_numpy.masks import causal_mask, padding_mask, target_padding_mask
from reference_numpy.names import count_parameters, parameter_shapes, tap_shapes
from reference_numpy.runtime import describe, set_precision
from reference_numpy.taps import Recorder, no_tap, within
from reference_numpy.transformer import Transformer, load_transformer
from reference_numpy.weights import get_weights, init_weights, set_weights

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderLayer",
    "Dropout",
    "DropoutRates",
    "Encoder",
    "EncoderLayer",
    "LayerNorm",
    "LearnedPosition",
    "Linear",
    "MultiHeadAttention",
    "OutputProjection",
    "PositionwiseFeedForward",
    "Recorder",
    "SinusoidalPosition",
    "TokenEmbedding",
    "Transformer",
    "TransformerConfig",
    "additive_attention",
    "causal_mask",
    "count_parameters",
    "describe",
    "get_weights",
    "init_weights",
    "load_transformer",
    "load_weights",
    "merge_heads",
    "no_tap",
    "padding_mask",
    "parameter_shapes",
    "save_weights",
    "scaled_dot_product_attention",
    "set_precision",
    "set_weights",
    "sinusoidal_encoding",
    "split_heads",
    "tap_shapes",
    "target_padding_mask",
    "within",
]
