"""Candidates about a port: bugs and conventions, their places, their combinations, and the code that tries them."""
