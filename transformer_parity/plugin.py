"""The public API for writing a port. Start with ``Port``.

A port is an implementation that ``parity`` compares with the NumPy reference.
"""

from transformer_parity.transformer.ports.user import Port
from transformer_spec.taps import Tap, no_tap
from transformer_spec.training_config import Gradients, TrainingConfig

__all__ = ["Gradients", "Port", "Tap", "TrainingConfig", "no_tap"]
