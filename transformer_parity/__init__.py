"""The comparison of the four packages, and of ports that a user brings, with the reference."""
