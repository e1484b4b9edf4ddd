"""Find evidence about a difference: the first wrong block, its error, and patterns in the tensors and the cases."""
