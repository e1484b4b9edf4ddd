"""Measure time and memory: participants, interleaved rounds, verified results, tables and plots."""

from transformer_parity import __version__

__all__ = ["__version__"]
