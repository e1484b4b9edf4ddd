"""Readers for other software's file formats, which return NumPy arrays and never run code from a file."""
