"""Measure time and memory: participants, interleaved rounds, verified results, tables and plots."""
