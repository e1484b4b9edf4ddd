"""Bugs that are not injected into any package and serve only as candidates for the diagnosis."""
