"""Child processes: start them, exchange messages with them, and clean up after them."""
