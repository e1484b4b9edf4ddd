"""Utilities for files, signals, errors, and information about the machine."""
