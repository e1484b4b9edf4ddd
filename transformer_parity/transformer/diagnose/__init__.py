"""Diagnosis: where a difference starts, and which known bug or convention explains it."""
