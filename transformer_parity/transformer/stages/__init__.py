"""The stages of a comparison: one file for each stage, the base classes, and the registry."""
