"""Golden vectors: files with the tensors that a model computes, and functions that write, read, and compare them."""
