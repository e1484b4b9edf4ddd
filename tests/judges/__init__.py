"""Comparisons with other programs, each of which runs in an environment that contains this program."""
