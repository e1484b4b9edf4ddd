"""Plots of positions, masks, attention weights, and of the measurements behind docs/why.md."""
