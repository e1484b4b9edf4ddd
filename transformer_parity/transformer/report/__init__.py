"""A comparison as tables, as one dict, and as JSON, JUnit and HTML."""
