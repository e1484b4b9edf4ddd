"""Derive a port's settings from its tensors: learning rates, optimizer settings, and search parameters."""
