"""The stages of a comparison: one file for each, and what two of them share."""
