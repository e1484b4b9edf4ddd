"""Plots of positional encodings, masks, and attention weights."""
