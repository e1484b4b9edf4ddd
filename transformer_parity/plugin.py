"""The public names of what a port of your own is made of: see ``Port``."""

from reference_numpy.taps import Tap, no_tap
from reference_numpy.training_config import Gradients, TrainingConfig
from transformer_parity.ports.user import Port

__all__ = ["Gradients", "Port", "Tap", "TrainingConfig", "no_tap"]
