"""Readers for the file formats of other software.

They return NumPy arrays, never run code from a file, and check sizes before they allocate memory.
"""
