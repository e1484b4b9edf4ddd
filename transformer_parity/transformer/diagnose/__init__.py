"""Find the block in which a port starts to differ, and the known bug or convention that explains the difference."""
