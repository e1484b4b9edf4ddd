"""The dates task, and vocabularies in other software's formats."""
