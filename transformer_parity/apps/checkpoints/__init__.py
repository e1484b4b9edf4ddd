"""Checkpoints of other software, read and written: one table of names for each format."""
