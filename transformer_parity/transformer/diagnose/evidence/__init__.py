"""Find evidence about a difference: the first wrong block, and patterns in its error, the tensors, and the cases."""
