"""Compare any two implementations: processes, files and reports that know nothing of the Transformer."""
