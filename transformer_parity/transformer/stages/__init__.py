"""The stages of a comparison: one file for each, their base classes, and the registry."""
