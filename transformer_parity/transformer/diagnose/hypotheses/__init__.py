"""Hypotheses about a port: bugs and conventions, their places and combinations, and the code that tries them."""
