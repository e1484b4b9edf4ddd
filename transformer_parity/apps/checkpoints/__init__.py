"""Import and export of checkpoints in the formats of other software, using one table of parameter names per format."""
