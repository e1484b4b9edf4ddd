"""Sentence pairs and vocabularies."""
