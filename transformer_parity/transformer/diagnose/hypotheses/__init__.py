"""Hypotheses about a port: mistakes and conventions, their places and combinations, and how they are tried."""
