"""Report the result of a check as tables, JSON, and HTML."""
