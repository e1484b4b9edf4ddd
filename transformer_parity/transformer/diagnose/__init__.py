"""Find the first wrong block of a port, and the known bug or convention that explains the difference."""
