"""Compare the tensors of two implementations."""
