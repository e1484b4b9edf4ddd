"""Bugs that are not injected into any package and only serve as candidates for the diagnosis."""
