"""Benchmarks: measure time and memory in interleaved rounds, verify the results, and report tables and plots."""

from transformer_parity import __version__

__all__ = ["__version__"]
