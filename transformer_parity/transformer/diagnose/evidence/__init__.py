"""Evidence in the tensors that differ: the first wrong block, patterns of tensors and cases, and simple relations."""
