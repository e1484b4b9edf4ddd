"""Run each of two implementations in a separate process."""
