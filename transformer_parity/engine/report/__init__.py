"""Report the result of a comparison as tables, as trees, and as JSON."""
