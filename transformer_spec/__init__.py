"""Definitions that the four model packages share.

This package defines configs, the names and shapes of parameters, input checks, settings for search and training, and
file formats. It contains no implementation of the model and imports none of the model packages. Each of the model
packages re-exports the names in ``__all__``.
"""

from transformer_spec.checkpoint import Checkpoint, average_weights, load_checkpoint, save_checkpoint
from transformer_spec.config import DropoutRates, TransformerConfig
from transformer_spec.files import VocabularyFiles, load_notes, load_vocabulary, load_weights, save_weights
from transformer_spec.init_weights import init_weights
from transformer_spec.names import count_parameters, parameter_shapes, tap_shapes
from transformer_spec.parallel_plan import Plan
from transformer_spec.presets import PRESETS
from transformer_spec.search import LENGTH_PENALTIES, Scores, Search, SearchResult, length_penalty
from transformer_spec.search_rules import SearchRules
from transformer_spec.taps import Recorder, Tap, no_tap, within
from transformer_spec.training_config import Gradients, StepResult, TrainingConfig, TrainingState

__version__ = "0.1.0"
__all__ = [
    "LENGTH_PENALTIES",
    "PRESETS",
    "Checkpoint",
    "DropoutRates",
    "Gradients",
    "Plan",
    "Recorder",
    "Scores",
    "Search",
    "SearchResult",
    "SearchRules",
    "StepResult",
    "Tap",
    "TrainingConfig",
    "TrainingState",
    "TransformerConfig",
    "VocabularyFiles",
    "__version__",
    "average_weights",
    "count_parameters",
    "init_weights",
    "length_penalty",
    "load_checkpoint",
    "load_notes",
    "load_vocabulary",
    "load_weights",
    "no_tap",
    "parameter_shapes",
    "save_checkpoint",
    "save_weights",
    "tap_shapes",
    "within",
]
