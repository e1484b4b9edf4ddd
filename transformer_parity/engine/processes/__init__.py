"""Start child processes, exchange messages with them, and clean up after them."""
