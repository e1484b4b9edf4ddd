"""Read and write checkpoints of other software, with a table of parameter names for each format."""
