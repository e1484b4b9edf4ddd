"""Golden vectors: the outputs of a model in files, with functions to write, read, and compare them."""
