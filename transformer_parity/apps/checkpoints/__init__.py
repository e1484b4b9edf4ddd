"""Import and export checkpoints in other software's formats, using one table of parameter names per format."""
