"""Measure the settings of a port based on its tensors: learning rates, optimizer settings, and search parameters."""
