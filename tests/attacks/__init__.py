"""Attacks on the verdict AGREE: what each plants in a port, in files or in options, and what has to come of it."""
