"""Searches, judged: near-ties between continuations, and the reference run on the prefixes that a port chose."""
