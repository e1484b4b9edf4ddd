"""Translation of text with a trained model, using any backend."""
