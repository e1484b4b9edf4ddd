"""Compare any two implementations of any model."""
