"""Find the place and the cause of a difference between two implementations."""
