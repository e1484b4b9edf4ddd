"""A comparison of any two implementations as tables, as trees, and as plain values."""
