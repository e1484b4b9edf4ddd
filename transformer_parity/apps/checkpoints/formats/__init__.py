"""Checkpoint formats of other software. Each module defines a table of names, a reader and, for some, a writer."""
