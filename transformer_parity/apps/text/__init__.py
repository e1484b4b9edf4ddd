"""The dates task, and vocabularies in the formats of other software."""
