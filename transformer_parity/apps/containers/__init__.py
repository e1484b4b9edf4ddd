"""Readers that convert other software's files to NumPy arrays and never run code from a file."""
