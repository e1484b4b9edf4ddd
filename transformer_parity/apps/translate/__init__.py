"""Translate text with a trained model, in any package."""
