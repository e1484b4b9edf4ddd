"""A common protocol for the four packages and for ports that users write."""
