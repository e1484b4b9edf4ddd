"""Candidates that may explain how a port differs: bugs and conventions, their places, combinations, and trials."""
