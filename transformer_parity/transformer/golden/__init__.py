"""Golden vectors: the outputs of a model as files, written, read and compared."""
