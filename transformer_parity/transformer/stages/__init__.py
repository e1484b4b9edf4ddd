"""The stages of a comparison: one file for each, and shared helpers."""
