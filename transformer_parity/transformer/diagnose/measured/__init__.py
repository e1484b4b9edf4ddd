"""Measure a port's settings based on its tensors: learning rates, optimizer settings, and search parameters."""
