"""Outputs and their comparison: what a case shows, how close it has to be, and the verdict."""
