"""Sentence pairs, vocabularies, and subwords."""
