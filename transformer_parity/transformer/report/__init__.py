"""A comparison as tables, as one dict, and as JSON and HTML."""
