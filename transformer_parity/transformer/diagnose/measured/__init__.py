"""Measure the settings of a port in its tensors: learning rates, optimizer settings, and search parameters."""
