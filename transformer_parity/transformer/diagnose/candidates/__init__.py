"""Try bugs and conventions that may explain why a port differs, in the full model, in parts of it, or combined."""
