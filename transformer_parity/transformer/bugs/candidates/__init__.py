"""Bugs that are not injected into ports and serve only as candidates for the diagnosis."""
