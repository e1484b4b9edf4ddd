"""Hypotheses about a port: bugs and conventions, where they apply, their combinations, and the code that tries them."""
