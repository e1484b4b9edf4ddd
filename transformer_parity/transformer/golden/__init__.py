"""Golden vectors: files with a model's outputs, and functions that write, read, and compare them."""
