"""Numbers measured in a port's tensors instead of searched for: rates, optimizer settings, and search parameters."""
