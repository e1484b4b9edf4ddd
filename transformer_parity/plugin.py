"""The public names of what a port of your own is made of: see ``Port``."""

from transformer_parity.transformer.ports.user import Port
from transformer_spec.taps import Tap, no_tap
from transformer_spec.training_config import Gradients, TrainingConfig

__all__ = ["Gradients", "Port", "Tap", "TrainingConfig", "no_tap"]
