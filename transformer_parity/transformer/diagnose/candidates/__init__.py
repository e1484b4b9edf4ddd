"""Try bugs and conventions, individually or combined, in the full model or in parts of it, to explain a difference."""
