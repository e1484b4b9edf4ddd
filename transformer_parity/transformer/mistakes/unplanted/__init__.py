"""Mistakes that are planted in no package and only serve as hypotheses."""
