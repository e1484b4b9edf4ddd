"""One module for each format of other software: its table of names, what reads it and what writes it."""
