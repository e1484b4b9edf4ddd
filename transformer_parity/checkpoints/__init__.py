"""Other people's checkpoints, and ours for other people: one table of names for each format."""
