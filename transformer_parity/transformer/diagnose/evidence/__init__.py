"""Evidence from the tensors that differ: the first wrong block, patterns in tensors and cases, and simple relations."""
