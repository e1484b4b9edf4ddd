"""Evidence in the tensors that differ: the first wrong place, patterns of tensors and cases, and simple relations."""
