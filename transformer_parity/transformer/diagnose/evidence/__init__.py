"""What a difference shows by itself: the first wrong place, patterns of tensors and cases, and simple relations."""
