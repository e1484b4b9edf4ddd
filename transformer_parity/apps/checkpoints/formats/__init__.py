"""Other software's checkpoint formats. Each module defines a table of names, a reader, and possibly a writer."""
