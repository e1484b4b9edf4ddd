"""Pairs in the wild: models of public libraries against the models of transformers that they port."""
