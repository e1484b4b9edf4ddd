"""The Transformer of "Attention Is All You Need", written down once in NumPy: the definition.

Post-norm, as in the paper, unless the config says otherwise. Read the modules in the paper's order: masks,
attention, feed_forward, embedding, encoder, decoder, transformer, then backward, training and search.
"""

from reference_numpy.attention import (
    KeyValueCache,
    KeyValues,
    MultiHeadAttention,
    additive_attention,
    merge_heads,
    scaled_dot_product_attention,
    split_heads,
)
from reference_numpy.backward import transformer_backward
from reference_numpy.checkpoint import Checkpoint, average_weights, load_checkpoint, save_checkpoint
from reference_numpy.config import DropoutRates, TransformerConfig
from reference_numpy.decoder import DecoderCache, DecoderLayer, DecoderStack
from reference_numpy.embedding import (
    LearnedPosition,
    OutputProjection,
    SinusoidalPosition,
    TokenEmbedding,
    sinusoidal_encoding,
)
from reference_numpy.encoder import EncoderLayer, EncoderStack
from reference_numpy.feed_forward import PositionwiseFeedForward
from reference_numpy.files import VocabularyFiles, load_notes, load_vocabulary, load_weights, save_weights
from reference_numpy.layers import Dropout, LayerNorm, Linear
from reference_numpy.masks import causal_mask, padding_mask, target_padding_mask
from reference_numpy.names import count_parameters, parameter_shapes, tap_shapes
from reference_numpy.parallel import make_mesh, shards
from reference_numpy.parallel_plan import Plan
from reference_numpy.presets import PRESETS
from reference_numpy.runtime import describe, set_precision
from reference_numpy.search import beam_search, greedy_search
from reference_numpy.search_plan import LENGTH_PENALTIES, SearchResult, SearchRules, length_penalty
from reference_numpy.taps import Recorder, no_tap, within
from reference_numpy.training import Trainer, cross_entropy, gradients
from reference_numpy.training_config import Gradients, StepResult, TrainingConfig, TrainingState
from reference_numpy.transformer import Decoder, Encoder, Transformer, load_transformer
from reference_numpy.weights import get_weights, init_weights, set_weights
