"""Settings that are measured in a port's tensors: learning rates, optimizer settings, and search parameters."""
