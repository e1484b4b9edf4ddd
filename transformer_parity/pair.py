"""The public API for comparing two implementations of a model. Start with ``Implementation``."""

from transformer_parity.pairs.assertion import assert_parity
from transformer_parity.pairs.contract import capture
from transformer_parity.pairs.contract.implementation import Implementation, Tap

__all__ = ["Implementation", "Tap", "assert_parity", "capture"]
