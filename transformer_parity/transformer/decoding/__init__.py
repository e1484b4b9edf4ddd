"""Evaluation of searches: near-ties between continuations, and the reference's scores for the prefixes of a port."""
