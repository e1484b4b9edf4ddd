"""Readers for other software's file formats.

The readers return NumPy arrays, never run code from a file, and check sizes before they allocate memory.
"""
