"""Evaluation of searches: near-ties between continuations, and the reference's scores for a port's prefixes."""
