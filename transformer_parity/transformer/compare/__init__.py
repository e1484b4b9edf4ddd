"""Comparison of a port with the reference in a case, according to the stage of the case."""
