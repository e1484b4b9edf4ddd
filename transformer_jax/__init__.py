"""The Transformer of "Attention Is All You Need" as Flax NNX modules; see reference_numpy for the definition."""

from transformer_jax.attention import (
    KeyValueCache,
    KeyValues,
    MultiHeadAttention,
    merge_heads,
    scaled_dot_product_attention,
    split_heads,
)
from transformer_jax.decoder import DecoderCache, DecoderLayer, DecoderStack
from transformer_jax.embedding import (
    LearnedPosition,
    OutputProjection,
    SinusoidalPosition,
    TokenEmbedding,
    sinusoidal_encoding,
)
from transformer_jax.encoder import EncoderLayer, EncoderStack
from transformer_jax.feed_forward import PositionwiseFeedForward
from transformer_jax.layers import Dropout, LayerNorm, Linear
from transformer_jax.masks import causal_mask, padding_mask, target_padding_mask
from transformer_jax.parallel import make_mesh, shards
from transformer_jax.runtime import describe, set_precision
from transformer_jax.search import beam_search, greedy_search
from transformer_jax.training import Trainer, cross_entropy, gradients
from transformer_jax.transformer import Decoder, Encoder, Transformer, load_transformer
from transformer_jax.weights import get_weights, set_weights
